"""Where one forward step's rows and states lie in the pool: reads and writes by page table, without a loop over tokens.

A step has B sequences and M new tokens: M tokens of one sequence (prefill, B = 1), or one of each (decode, M = B).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forebay.kvstore.device import DevicePool

PageTable = dict[str, npt.NDArray[np.int32]]
"""Lease.pages: of a paged group int32 [layers, pages], page p of a layer holding tokens p·page_tokens …; of a state
group int32 [layers, 1], the running state's page."""


class StepRows:
    """Rows of one paged group. `place` is a layer's place in it; the new tokens stand at `positions` int64 [M]."""

    def __init__(
        self,
        pool: DevicePool,
        group: str,
        dtype: torch.dtype,
        elements: int,
        tables: Sequence[PageTable],
        positions: Tensor,
    ) -> None:
        self.view = pool.rows(group, dtype, elements)
        self.page_tokens = self.view.shape[1]
        needed = int(positions.max()) // self.page_tokens + 1
        self.tables = _stacked([table[group][:, :needed] for table in tables], needed).to(self.view.device)
        sequence = torch.arange(len(tables), device=positions.device)
        self._pages = self.tables[:, sequence, positions // self.page_tokens]
        self._offsets = positions % self.page_tokens

    def write(self, place: int, rows: Tensor) -> None:
        """Rows [M, elements] of the new tokens."""
        self.view[self._pages[place], self._offsets] = rows

    def read(self, place: int) -> Tensor:
        """All rows [B, S, elements], whole pages: what lies beyond a sequence's length is any bytes."""
        batch = self.tables.shape[1]
        return self.view.index_select(0, self.tables[place].flatten()).view(batch, -1, self.view.shape[2])

    def take(self, place: int, positions: Tensor) -> Tensor:
        """Rows [M, k, elements] at positions int64 [M, k] of each token's own sequence; the group fills its pages."""
        assert self.view.is_contiguous(), "rows lie one after another through the whole pool"
        table = self.tables[place].expand(len(positions), -1)
        page = positions // self.page_tokens
        row = table.gather(1, page) * self.page_tokens + (positions - page * self.page_tokens)
        return self.view.flatten(0, 1).index_select(0, row.flatten()).view(*positions.shape, -1)


class StepStates:
    """Running states of all KDA layers: recurrent fp32 [H, K, V], then the convolution tail [W-1, 3·H·K]."""

    def __init__(
        self,
        pool: DevicePool,
        state: tuple[int, ...],
        tail: tuple[int, ...],
        dtype: torch.dtype,
        tables: Sequence[PageTable],
    ) -> None:
        self._states = pool.field(torch.float32, state)
        self._tails = pool.field(dtype, tail, 4 * int(np.prod(state)))
        self._pages: dict[int, Tensor] = {}
        for group in pool.layout.states:
            pages = torch.from_numpy(np.concatenate([table[group.name] for table in tables], axis=1).astype(np.int64))
            self._pages |= dict(zip(group.layers, pages.to(self._states.device), strict=True))

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Copies of the states [B, H, K, V] and tails [B, W-1, C] of `layer`."""
        pages = self._pages[layer]
        return self._states.index_select(0, pages), self._tails.index_select(0, pages)

    def write(self, layer: int, states: Tensor, tails: Tensor) -> None:
        pages = self._pages[layer]
        self._states.index_copy_(0, pages, states)
        self._tails.index_copy_(0, pages, tails)


def _stacked(tables: Sequence[npt.NDArray[np.int32]], pages: int) -> Tensor:
    """Page tables [layers, ≤ pages] of B sequences as int64 [layers, B, pages]; a short one is filled with page 0."""
    filled = np.zeros((len(tables[0]), len(tables), pages), dtype=np.int64)
    for sequence, table in enumerate(tables):
        filled[:, sequence, : table.shape[1]] = table
    return torch.from_numpy(filled)

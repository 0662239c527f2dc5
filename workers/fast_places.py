"""Where the sequences of a step lie, as tensors on the device: a captured step reads them, its caller fills them."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forebay.kernels.layer_parts import GlobalPart, KdaPart
from forebay.kernels.mla_batch import Pages
from forebay.kernels.shapes import ModelShape
from forebay.kvstore.device import DevicePool
from forebay.kvstore.layout import INDEX, LATENT
from forebay.workers.attention import key_row
from forebay.workers.fast_weights import FastKda, FastLayer
from forebay.workers.step_pages import PageTable

Ids = npt.NDArray[np.int32]


class Places:
    """Page tables of B sequences: of a paged group int32 [layers, B, width], of the states int32 [KDA layers, B], in
    one tensor. Rows that no sequence fills point at the pool's spare page.
    """

    def __init__(self, shape: ModelShape, pool: DevicePool, batch: int, widths: dict[str, int]) -> None:
        self._shape, self._pool, self._batch = shape, pool, batch
        self._dims = {group.name: (len(group.layers), batch, widths[group.name]) for group in pool.layout.paged}
        self._dims["states"] = (len(shape.kda_layers), batch, 1)
        sizes = {name: int(np.prod(dims)) for name, dims in self._dims.items()}
        self._flat = torch.empty(sum(sizes.values()), dtype=torch.int32, device=pool.bytes.device)
        parts = torch.split(self._flat, list(sizes.values()))
        self.tables = {name: part.view(dims) for (name, dims), part in zip(self._dims.items(), parts, strict=True)}
        self.fill(())

    def fill(self, tables: Sequence[PageTable]) -> None:
        """Takes the tables of up to B sequences, with one copy to the device."""
        host = {name: np.full(dims, self._pool.n_pages, np.int32) for name, dims in self._dims.items()}
        for row, table in enumerate(tables):
            for group in self._pool.layout.paged:
                pages = table[group.name]
                host[group.name][:, row, : pages.shape[1]] = pages
            host["states"][:, row, 0] = self.state_pages(table)
        flat = np.concatenate([part.ravel() for part in host.values()])
        self._flat.copy_(torch.from_numpy(flat))

    def state_pages(self, table: PageTable) -> Ids:
        """Pages of the running states of a sequence, by rising layer."""
        by_layer = {
            layer: int(table[group.name][place, 0])
            for group in self._pool.layout.states
            for place, layer in enumerate(group.layers)
        }
        return np.array([by_layer[layer] for layer in self._shape.kda_layers], np.int32)

    def bind(self, layers: Sequence[FastLayer], dtype: torch.dtype) -> list[KdaPart | GlobalPart]:
        """Each layer's attention with the pool's views and its tables."""
        k, pool = self._shape.kda, self._pool
        states = pool.field(torch.float32, (k.heads, k.head_dim, k.head_dim))
        tails = pool.field(dtype, (k.conv_width - 1, 3 * k.width), 4 * k.heads * k.head_dim**2)
        rows = pool.rows(LATENT, dtype, self._shape.mla.row_elements)
        keys = None if self._shape.index is None else pool.rows(INDEX, *key_row(self._shape.index))
        bound: list[KdaPart | GlobalPart] = []
        kdas = globals_ = 0
        for layer in layers:
            if isinstance(layer.attention, FastKda):
                bound.append(layer.attention.at(states, tails, self.tables["states"][kdas, :, 0]))
                kdas += 1
            else:
                bound.append(layer.attention.at(self._pages(rows, LATENT, globals_), self._keys(keys, globals_)))
                globals_ += 1
        return bound

    def _pages(self, view: Tensor, group: str, place: int) -> Pages:
        return Pages(pool=view, table=self.tables[group][place])

    def _keys(self, view: Tensor | None, place: int) -> Pages | None:
        return None if view is None else self._pages(view, INDEX, place)


def widths_of(tables: Sequence[PageTable], pool: DevicePool) -> dict[str, int]:
    """Columns that hold every table's pages, rounded up to a power of two: a captured step serves for a while."""
    most = {group.name: max(table[group.name].shape[1] for table in tables) for group in pool.layout.paged}
    return {name: 1 << (pages - 1).bit_length() for name, pages in most.items()}

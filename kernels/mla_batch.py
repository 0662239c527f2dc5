"""Latent attention on pages, in torch: the slow twins of the CUDA kernels, and what runs where there is no CUDA device.

T queries are one token of each of T sequences (decode), or T tokens of one (prefill): the table has T rows, or one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.kernels import mla


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """Rows of N sequences: pool [n_pages, page_tokens, width], table int32 [N, pages]. Sequences may share pages."""

    pool: Tensor
    table: Tensor

    @property
    def page_tokens(self) -> int:
        return self.pool.shape[1]

    def queries_each(self, queries: int) -> int:
        """Of how many of T queries a sequence's row of the table is, in their order."""
        assert queries % len(self.table) == 0, "queries divide over the sequences"
        return queries // len(self.table)

    def slots(self, positions: Tensor) -> Tensor:
        """Rows of the pool, counted through all pages, of positions [T, ..] of each query's sequence, int64."""
        each = self.queries_each(len(positions))
        table = self.table.long().repeat_interleave(each, 0)
        flat = positions.long().flatten(1)
        page = table.gather(1, flat // self.page_tokens)
        return (page * self.page_tokens + flat % self.page_tokens).view(positions.shape)

    def take(self, slots: Tensor) -> Tensor:
        """Rows [.., width] of the pool."""
        return self.pool.flatten(0, 1)[slots]


def attend(q: Tensor, pages: Pages, lengths: Tensor, scale: float, rank: int) -> Tensor:
    """Absorbed attention of queries [T, H, r+pe], not scaled, over rows 0 .. length-1 of their sequences; lengths int32
    [T], each >= 1. Returns the weighted latent rows [T, H, r] in q's dtype.
    """
    longest = int(lengths.max())
    positions = torch.arange(longest, device=q.device).expand(len(q), -1)
    return attend_slots(q, pages, _bounded(pages, positions, lengths), lengths, scale, rank)


def attend_slots(q: Tensor, pages: Pages, slots: Tensor, counts: Tensor, scale: float, rank: int) -> Tensor:
    """The same over the first counts[t] (int32 [T], each >= 1) of the pool's rows slots [T, k]."""
    visible = torch.arange(slots.shape[1], device=q.device) < counts[:, None]
    rows = pages.take(slots.long().masked_fill(~visible, 0)).float().masked_fill(~visible[..., None], 0.0)
    return mla.attend_latent(q.float() * scale, rows, visible, rank).to(q.dtype)


def prefill(q: Tensor, pages: Pages, w_uk: Tensor, w_uv: Tensor, start: int) -> Tensor:
    """`mla.attend_prefill` of one sequence on its pages."""
    positions = torch.arange(start + len(q), device=q.device)[None]
    return mla.attend_prefill(q, pages.take(pages.slots(positions)[0]), w_uk, w_uv, start)


def _bounded(pages: Pages, positions: Tensor, lengths: Tensor) -> Tensor:
    """Slots of the positions before each length, 0 from there on."""
    seen = positions < lengths[:, None]
    return pages.slots(positions.masked_fill(~seen, 0)).masked_fill(~seen, 0)

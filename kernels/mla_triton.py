"""Latent attention on a CUDA device: launches of the Triton kernels, with the signatures of `mla_batch`.

A part is a share of a query's rows; how many parts there are depends on shapes alone, so a launch can be captured in
a graph while lengths and tables change on the device.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels import mla_latent_gluon
from forebay.kernels.mla_batch import Pages
from forebay.kernels.mla_latent_gluon import RANK, SIDE
from forebay.kernels.mla_latent_triton import latent_kernel, merge_kernel
from forebay.kernels.mla_prefill_triton import prefill_kernel

LOG2E = 1.4426950408889634
SEGMENT = 8192  # keys that a prefill expands at a time
PARTS_MAX = 32
FEW_HEADS = 16  # of a program of Triton's kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Launch shapes. `parts` 0: as many as fill the device. `exact`: weights in two parts of bf16, where the kernel
    laid out by hand runs; the other shapes are those of Triton's.
    """

    parts: int = 0
    exact: bool = True
    tile: int = 32
    stages: int = 5
    warps: int = 4
    merge_columns: int = 512
    merge_warps: int = 4
    prefill_queries: int = 128
    prefill_tile: int = 64
    prefill_stages: int = 3
    prefill_warps: int = 8


TUNED = Tuning()


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a few where the kernels are interpreted, so that rows are split there too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def low(dtype: torch.dtype) -> tl.dtype:
    """The type of the products."""
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float32


def parts_to_fill(blocks: int, rows: int, tile: int, processors: int) -> int:
    """In how many parts to cut each query's rows so that blocks x parts fill the processors once, one tile the
    least.
    """
    return max(1, min(processors // blocks, -(-rows // tile), PARTS_MAX))


def attend(q: Tensor, pages: Pages, lengths: Tensor, scale: float, rank: int, tuning: Tuning = TUNED) -> Tensor:
    """`mla_batch.attend`; splits as for tables that are filled."""
    assert pages.page_tokens % tuning.tile == 0, "a tile lies inside a page"
    rows = pages.table.shape[1] * pages.page_tokens
    return _attend(q, pages, None, lengths, rows, scale, rank, tuning)


def attend_slots(
    q: Tensor, pages: Pages, slots: Tensor, counts: Tensor, scale: float, rank: int, tuning: Tuning = TUNED
) -> Tensor:
    """`mla_batch.attend_slots`."""
    return _attend(q, pages, slots, counts, slots.shape[1], scale, rank, tuning)


def by_hand(q: Tensor, rank: int) -> bool:
    """Whether the kernel that is laid out by hand takes these queries [T, H, r+pe]; with few heads a block of 64 would
    stand nearly empty.
    """
    return q.dtype == torch.bfloat16 and q.shape[1] > FEW_HEADS and (rank, q.shape[2] - rank) == (RANK, SIDE)


def _attend(
    q: Tensor, pages: Pages, slots: Tensor | None, lengths: Tensor, rows: int, scale: float, rank: int, tuning: Tuning
) -> Tensor:
    queries, heads, width = q.shape
    assert pages.pool.is_contiguous(), "rows lie one after another through the whole pool"
    assert q.stride()[1:] == (width, 1), "heads lie side by side in a row"
    hand = by_hand(q, rank)
    block, tile = (SIDE, SIDE) if hand else (FEW_HEADS, tuning.tile)
    blocks = triton.cdiv(heads, block)
    parts = tuning.parts or parts_to_fill(queries * blocks, rows, tile, processors(q.device))
    o = torch.empty((queries, heads, rank), dtype=q.dtype, device=q.device)
    partial = torch.empty((queries, parts, heads, rank), dtype=torch.float32, device=q.device) if parts > 1 else o
    tops, weights = (torch.empty((queries, parts, heads), dtype=torch.float32, device=q.device) for _ in range(2))
    chosen = lengths if slots is None else slots
    kernel, own = (
        (mla_latent_gluon.latent_kernel, {"EXACT": tuning.exact, "num_warps": mla_latent_gluon.WARPS})
        if hand
        else (latent_kernel, {"LOW": low(q.dtype), "STAGES": tuning.stages, "num_warps": tuning.warps})
    )
    kernel[(blocks, parts, queries)](
        q, pages.pool, pages.table, chosen, lengths, partial, tops, weights, scale * LOG2E, q.stride(0),
        pages.table.stride(0), chosen.stride(0), pages.queries_each(queries), heads,
        RANK=rank, PE=width - rank, HEADS=block, TILE=tile, PAGE=pages.page_tokens, SPARSE=slots is not None,
        SPLIT=parts > 1, **own,
    )  # fmt: skip
    if parts > 1:
        columns = min(tuning.merge_columns, rank)
        merge_kernel[(rank // columns, heads, queries)](
            partial, tops, weights, o, RANK=rank, PARTS=parts, MAX=triton.next_power_of_2(parts), COLUMNS=columns,
            num_warps=tuning.merge_warps,
        )  # fmt: skip
    return o


def prefill(
    q: Tensor, pages: Pages, w_uk: Tensor, w_uv: Tensor, start: int, tuning: Tuning = TUNED, segment: int = SEGMENT
) -> Tensor:
    """`mla_batch.prefill`, keys in segments of a multiple of the page's or the page of the segment's."""
    tokens, heads, width = q.shape
    nope, rank, value = w_uk.shape[1], w_uk.shape[2], w_uv.shape[2]
    assert q.stride()[1:] == (width, 1), "heads lie side by side in a row"
    expand = torch.cat((w_uk.transpose(1, 2), w_uv), dim=2).permute(1, 0, 2).reshape(rank, -1).to(q.dtype)
    o = torch.empty((tokens, heads, value), dtype=q.dtype, device=q.device)
    tops, weights = (torch.empty((tokens, heads), dtype=torch.float32, device=q.device) for _ in range(2))
    carried = torch.empty((tokens, heads, value), dtype=torch.float32, device=q.device)
    length = start + tokens
    for first in range(0, length, segment):
        rows = _rows_of(pages, first, min(first + segment, length))
        keys = rows[:, :rank] @ expand
        prefill_kernel[(heads, triton.cdiv(tokens, tuning.prefill_queries))](
            q, keys, rows, o, tops, weights, carried, width**-0.5 * LOG2E, tokens, len(rows), start - first,
            q.stride(0), keys.stride(0), heads,
            NOPE=nope, PE=width - nope, RANK=rank, V=value, QUERIES=tuning.prefill_queries, TILE=tuning.prefill_tile,
            FIRST=first == 0, LAST=first + segment >= length, LOW=low(q.dtype), STAGES=tuning.prefill_stages,
            num_warps=tuning.prefill_warps,
        )  # fmt: skip
    return o


def _rows_of(pages: Pages, first: int, last: int) -> Tensor:
    """Rows of positions first .. last-1 of the one sequence, side by side: [last - first, width]."""
    size = pages.page_tokens
    whole = pages.pool.index_select(0, pages.table[0, first // size : -(-last // size)]).flatten(0, 1)
    return whole[first % size : first % size + last - first].contiguous()

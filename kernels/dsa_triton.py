"""The indexer on a CUDA device: launches of the Triton kernels, with the signatures of `dsa_batch`."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from forebay.kernels.dsa_batch import GROUP, Chosen
from forebay.kernels.dsa_keys_triton import quantize_queries_kernel, write_keys_kernel
from forebay.kernels.dsa_scores_triton import scores_kernel
from forebay.kernels.mla_batch import Pages
from forebay.kernels.mla_triton import processors
from forebay.kernels.topk_triton import choose_kernel, list_kernel, maxima_kernel

ROWS = 16  # that a program of the small kernels takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Launch shapes. `score_half`: products of scores in fp16; `score_programs`: of them, how many a multiprocessor
    gets; `shared_queries`: queries of one sequence that a program of a prefill takes; `block`: scores that a program of
    top-k takes at a time; `pieces` and `programs`: in how many pieces at most to cut a row, and all of them.
    """

    score_half: bool = True
    score_tile: int = 128
    score_stages: int = 6
    score_warps: int = 4
    score_programs: int = 4
    shared_queries: int = 4
    shared_warps: int = 8
    shared_stages: int = 3
    block: int = 4096
    pieces: int = 32
    programs: int = 512
    list_warps: int = 4
    choose_warps: int = 8


TUNED = Tuning()


def write_keys(keys: Tensor, positions: Tensor, pages: Pages) -> None:
    """`dsa_batch.write_keys`."""
    T, D = keys.shape
    codes, scales = _views(pages)
    write_keys_kernel[(triton.cdiv(T, ROWS),)](
        keys, positions, pages.table, codes, scales, T, pages.queries_each(T), keys.stride(0), pages.table.stride(0),
        pages.pool.stride(0), D=D, BLOCK=ROWS, PAGE=pages.page_tokens, GROUP=GROUP,
    )  # fmt: skip


def _views(pages: Pages) -> tuple[Tensor, Tensor]:
    """All bytes of the pool as codes and as scales; the kernels know where a group has which."""
    pool = pages.pool
    assert pool[0].is_contiguous(), "a page's rows lie one after another"
    assert pages.page_tokens % GROUP == 0, "a page holds whole groups"
    return pool.view(torch.float8_e4m3fn), pool.view(torch.float32)


def quantize_queries(q: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """`dsa_batch.quantize_queries`."""
    T, H, D = q.shape
    assert q.stride()[1:] == (D, 1), "heads lie side by side in a row"
    codes = torch.empty((T, H, D), dtype=torch.float8_e4m3fn, device=q.device)
    weights = torch.empty((T, H), dtype=torch.float32, device=q.device)
    quantize_queries_kernel[(triton.cdiv(T * H, ROWS),)](
        q, w, codes, weights, (H * D) ** -0.5, T * H, H, w.stride(0), q.stride(0), D=D, BLOCK=ROWS
    )
    return codes, weights


def scores(codes: Tensor, weights: Tensor, pages: Pages, lengths: Tensor, width: int, tuning: Tuning = TUNED) -> Tensor:
    """`dsa_batch.scores`; beyond a length nothing is written. Rows begin on multiples of 16."""
    T, H, D = codes.shape
    each = pages.queries_each(T)
    together = tuning.shared_queries if each % tuning.shared_queries == 0 or each == T > 1 else 1
    stages, warps = (
        (tuning.score_stages, tuning.score_warps) if together == 1 else (tuning.shared_stages, tuning.shared_warps)
    )
    assert pages.page_tokens % tuning.score_tile == 0, "a tile lies inside a page"
    assert tuning.score_tile % GROUP == 0, "a tile holds whole groups"
    key_codes, key_scales = _views(pages)
    out = torch.empty((T, triton.cdiv(width, 16) * 16), dtype=torch.float32, device=codes.device)
    tiles = triton.cdiv(width, tuning.score_tile)
    parts = max(1, min(tiles, tuning.score_programs * processors(codes.device) * together // T))
    scores_kernel[(parts, triton.cdiv(T, together))](
        codes, weights, key_codes, key_scales, pages.table, lengths, out, T, each, pages.table.stride(0),
        pages.pool.stride(0), out.stride(0), H=H, D=D, QUERIES=together, TILE=tuning.score_tile,
        PAGE=pages.page_tokens, GROUP=GROUP, HALF=tuning.score_half, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return out[:, :width]


def top_k(values: Tensor, lengths: Tensor, k: int, pages: Pages, tuning: Tuning = TUNED) -> Chosen:
    """`dsa_batch.top_k`; rows of `values` begin on multiples of 16."""
    T, S = values.shape
    assert values.stride(0) % 16 == tuning.block % 16 == 0, "rows and blocks begin on multiples of 16"
    most = max(1, min(tuning.pieces, tuning.programs // T))
    piece = triton.cdiv(S, most * tuning.block) * tuning.block
    pieces = triton.cdiv(S, piece)
    groups = triton.next_power_of_2(triton.cdiv(2 * k, pieces))
    block = max(tuning.block, groups)
    width = triton.next_power_of_2(pieces * groups)

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=values.device)

    maxima, found, listed = ints(T, pieces * groups), ints(T, pieces * piece), ints(T, pieces)
    bounds, idx, slots, counts = ints(T, 2), ints(T, k), ints(T, k), ints(T)
    maxima_kernel[(pieces, T)](
        values, lengths, maxima, values.stride(0), piece, BLOCK=block, GROUPS=groups, num_warps=tuning.list_warps
    )
    list_kernel[(pieces, T)](
        values, lengths, maxima, found, listed, bounds, values.stride(0), found.stride(0), piece, pieces * groups, k,
        k // 16, BLOCK=block, W=width, num_warps=tuning.list_warps,
    )  # fmt: skip
    choose_kernel[(T,)](
        values, found, listed, bounds, pages.table, idx, slots, counts, values.stride(0), found.stride(0),
        pages.table.stride(0), pages.queries_each(T), piece, k, PIECES=pieces, W=triton.next_power_of_2(2 * k),
        PAGE=pages.page_tokens, num_warps=tuning.choose_warps,
    )  # fmt: skip
    return Chosen(positions=idx, slots=slots, counts=counts)

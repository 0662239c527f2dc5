"""The indexer on pages, in torch: the slow twins of the CUDA kernels, and what runs where there is no CUDA device.

A page of index keys holds groups of GROUP tokens: their fp8 codes one row after another, then their scales. A row of
D + 4 bytes a token, codes and scale together, would begin on no boundary that a wide load needs. A group takes the
bytes of its tokens' rows, so a page's first n tokens still lie in its first n (D + 4) bytes, for n a multiple of GROUP.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.kernels import dsa
from forebay.kernels.mla_batch import Pages

GROUP = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """positions int32 [T, k] ascending, -1 behind the counts[t] that there are (int32 [T]); slots int32 [T, k]: the
    rows of the latent pool that hold them, undefined behind.
    """

    positions: Tensor
    slots: Tensor
    counts: Tensor


def key_parts(pool: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a pool of keys uint8 [n_pages, page_tokens, D + 4]: codes e4m3 [n_pages, groups, GROUP, D] and scales
    fp32 [n_pages, groups, GROUP].
    """
    n, tokens, row = pool.shape
    assert tokens % GROUP == 0, "a page holds whole groups"
    whole = pool.view(n, tokens * row).view(n, tokens // GROUP, GROUP * row)
    codes = whole[..., : GROUP * (row - 4)].view(torch.float8_e4m3fn).view(n, tokens // GROUP, GROUP, row - 4)
    return codes, whole[..., GROUP * (row - 4) :].view(torch.float32)


def write_keys(keys: Tensor, positions: Tensor, pages: Pages) -> None:
    """Quantizes keys [T, D] and puts them at positions int32 [T] of their sequences."""
    codes, scales = key_parts(pages.pool)
    slot = pages.slots(positions[:, None])[:, 0]
    page, group, place = slot // pages.page_tokens, slot % pages.page_tokens // GROUP, slot % GROUP
    rows = dsa.quantize_keys(keys)
    codes.view(torch.uint8)[page, group, place] = rows[:, :-4]
    scales[page, group, place] = rows[:, -4:].contiguous().view(torch.float32)[:, 0]


def read_keys(pages: Pages, length: int) -> Tensor:
    """The first keys of every sequence, fp32 [N, length, D]."""
    codes, scales = key_parts(pages.pool)
    keys = codes.float() * scales[..., None]
    return keys.flatten(1, 2)[pages.table.long()].flatten(1, 2)[:, :length]


def quantize_queries(q: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Index queries [T, Hi, D] as e4m3, and weights [T, Hi] fp32 with the query's scale and the model's factors in."""
    rows = dsa.quantize_keys(q.flatten(0, 1))
    codes = rows[:, :-4].contiguous().view(torch.float8_e4m3fn).view(q.shape)
    scale = rows[:, -4:].contiguous().view(torch.float32).view(q.shape[:2])
    return codes, w.float() * (q.shape[1] * q.shape[2]) ** -0.5 * scale


def scores(codes: Tensor, weights: Tensor, pages: Pages, lengths: Tensor, width: int) -> Tensor:
    """Scores fp32 [T, width] of quantized queries over keys 0 .. length-1 of their sequences, lengths int32 [T].
    What stands from a length on is undefined; here it is -inf.
    """
    each = pages.queries_each(len(codes))
    keys = read_keys(pages, width)
    out = torch.full((len(codes), width), float("-inf"), device=codes.device)
    for t in range(len(codes)):
        seen = int(lengths[t])
        raw = (keys[t // each, :seen] @ codes[t].float().t()).relu_()
        out[t, :seen] = raw @ weights[t]
    return out


def top_k(values: Tensor, lengths: Tensor, k: int, pages: Pages) -> Chosen:
    """`dsa.top_k` of the first lengths[t] (int32 [T]) scores [T, S], with their rows in the pages of latent rows."""
    seen = torch.arange(values.shape[1], device=values.device) < lengths[:, None]
    positions = dsa.top_k(values.masked_fill(~seen, float("-inf")), k)
    there = positions >= 0
    slots = pages.slots(positions.clamp(min=0))
    return Chosen(positions=positions.int(), slots=slots.int(), counts=there.sum(1, dtype=torch.int32))

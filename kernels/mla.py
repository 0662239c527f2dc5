"""Multi-head latent attention without position encoding: every head reads one shared latent row a token.

A latent row is (c [r], k_pe [pe]); head h has the key (W_UK_h c, k_pe) and the value W_UV_h^T c. Prefill expands keys
and values (un-absorbed: fewer products for many queries); decode moves W_UK to the query and W_UV behind the sum
(absorbed:
the latent row is key and value of all heads). Softmax scale (nope + pe)^-0.5, softmax in fp32.

Keys are taken in tiles of fixed size that are merged in order. A tile that a query cannot see leaves its running
maximum, sum and accumulator as they were, bit for bit, so a row's result depends neither on later keys nor on the
length of its neighbours.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.kernels import exact

PREFILL_TILE = 256
DECODE_TILE = 64


def attend_prefill(q: Tensor, rows: Tensor, w_uk: Tensor, w_uv: Tensor, start: int) -> Tensor:
    """Causal attention of T queries at positions start .. start+T-1.

    q [T, H, nope+pe]; rows [start+T, r+pe], the latent rows of positions 0 .. start+T-1; w_uk [H, nope, r]; w_uv [H,
    r, v].
    Returns o [T, H, v] in q's dtype.
    """
    tokens, heads, rank = q.shape[0], q.shape[1], w_uk.shape[-1]
    assert rows.shape[0] == start + tokens, "rows end with the last query"
    queries = exact.pad_rows((q.float() * q.shape[-1] ** -0.5).transpose(0, 1))
    limit = start + torch.arange(queries.shape[1], device=q.device)[:, None]
    top = queries.new_full((heads, queries.shape[1], 1), float("-inf"))
    weight, acc = torch.zeros_like(top), queries.new_zeros(heads, queries.shape[1], w_uv.shape[-1])
    expand_k, expand_v = w_uk.float().transpose(1, 2), w_uv.float()
    for first in range(0, start + tokens, PREFILL_TILE):
        tile = exact.pad_rows(rows[first : first + PREFILL_TILE].float(), PREFILL_TILE).expand(heads, -1, -1)
        latent, shared = tile[..., :rank], tile[..., rank:]
        keys = torch.cat((exact.bmm(latent, expand_k), shared), dim=-1)
        scores = exact.bmm(queries, keys.transpose(1, 2))
        if first + PREFILL_TILE > start:
            position = torch.arange(first, first + PREFILL_TILE, device=q.device)
            scores = scores.masked_fill(position > limit, float("-inf"))
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        p, keep = torch.exp(scores - higher), torch.exp(top - higher)
        weight = weight * keep + p.sum(-1, keepdim=True)
        acc = acc * keep + exact.bmm(p, exact.bmm(latent, expand_v))
        top = higher
    return (acc / weight)[:, :tokens].transpose(0, 1).to(q.dtype)


def absorb(q: Tensor, w_uk: Tensor) -> Tensor:
    """q [T, H, nope+pe] with W_UK moved to it, scaled, fp32: [T, H, r+pe]."""
    scaled = q.float() * q.shape[-1] ** -0.5
    nope, shared = scaled[..., : w_uk.shape[1]], scaled[..., w_uk.shape[1] :]
    return torch.cat((exact.head_linear(nope, w_uk.float()), shared), dim=-1)


def attend_latent(queries: Tensor, rows: Tensor, visible: Tensor, rank: int) -> Tensor:
    """Absorbed attention, each query over rows of its own: queries [B, H, r+pe], rows [B, S, r+pe], visible [B, S]
    bool.

    Returns the weighted latent rows [B, H, r], fp32. All tiles are computed at once; cumsum, which adds strictly in
    order, merges them, so that trailing tiles without a visible row add exact zeros.
    """
    batch, heads, width = queries.shape
    missing = -rows.shape[1] % DECODE_TILE
    tiles = F.pad(rows.float(), (0, 0, 0, missing)).view(-1, DECODE_TILE, width)
    seen = F.pad(visible, (0, missing)).view(batch, -1, 1, DECODE_TILE)
    count = seen.shape[1]
    repeated = queries[:, None].expand(-1, count, -1, -1).reshape(-1, heads, width)
    scores = exact.bmm(repeated, tiles.transpose(1, 2)).view(batch, count, heads, DECODE_TILE)
    scores = scores.masked_fill(~seen, float("-inf"))
    top = scores.amax((1, 3), keepdim=True)
    p = torch.exp(scores - top)
    acc = exact.bmm(p.view(-1, heads, DECODE_TILE), tiles[..., :rank]).view(batch, count, heads, rank)
    weight = p.sum(-1, keepdim=True)
    if count == 1:
        return acc[:, 0] / weight[:, 0]
    return acc.cumsum(1)[:, -1] / weight.cumsum(1)[:, -1]


def attend_decode(q: Tensor, rows: Tensor, lengths: Tensor, w_uk: Tensor, w_uv: Tensor) -> Tensor:
    """One query of each of B sequences over its own latent rows 0 .. length-1 (its own token's row included).

    q [B, H, nope+pe]; rows [B, S, r+pe] gathered from the pages, anything finite beyond a length; lengths int64 [B],
    each >= 1; w_uk [H, nope, r]; w_uv [H, r, v]. Returns o [B, H, v] in q's dtype.
    """
    visible = torch.arange(rows.shape[1], device=q.device) < lengths[:, None]
    latent = attend_latent(absorb(q, w_uk), rows, visible, w_uk.shape[-1])
    return exact.head_linear(latent, w_uv.float()).to(q.dtype)

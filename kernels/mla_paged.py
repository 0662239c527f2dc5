"""Gated latent attention and its sparse form on pages, whole: from projected queries to what the output projection
takes.

The absorbing products are one batched matrix product each, before and behind the kernels; the kernels come by device.
"""

import torch
from torch import Tensor

from forebay.kernels import by_device, exact
from forebay.kernels.mla_batch import Pages


def absorb(q: Tensor, w_uk: Tensor) -> Tensor:
    """q [T, H, nope+pe] with W_UK moved to it, not scaled, in q's dtype: [T, H, r+pe]."""
    nope = w_uk.shape[1]
    return torch.cat((exact.head_linear(q[..., :nope], w_uk.to(q.dtype)), q[..., nope:]), dim=-1)


def gated(o: Tensor, gate: Tensor | None) -> Tensor:
    """o [T, H, v] times the sigmoid of the gate's logits [T, H, v], in o's dtype."""
    return o if gate is None else (o.float() * exact.sigmoid(gate.float())).to(o.dtype)


def decode(q: Tensor, pages: Pages, lengths: Tensor, w_uk: Tensor, w_uv: Tensor, gate: Tensor | None) -> Tensor:
    """One token q [B, H, nope+pe] of each of B sequences over all its rows: [B, H, v]. lengths int32 [B]."""
    scale, rank = q.shape[-1] ** -0.5, w_uk.shape[-1]
    latent = by_device.mla(q.device).attend(absorb(q, w_uk), pages, lengths, scale, rank)
    return gated(exact.head_linear(latent, w_uv.to(q.dtype)), gate)


def prefill(q: Tensor, pages: Pages, w_uk: Tensor, w_uv: Tensor, start: int, gate: Tensor | None) -> Tensor:
    """T tokens q [T, H, nope+pe] of one sequence from position `start` on over all rows before and in them: [T, H,
    v].
    """
    return gated(by_device.mla(q.device).prefill(q, pages, w_uk, w_uv, start), gate)


def sparse(
    q: Tensor, index_q: Tensor, head_weights: Tensor, rows: Pages, keys: Pages, lengths: Tensor, top_k: int,
    w_uk: Tensor, w_uv: Tensor, gate: Tensor | None,
) -> Tensor:  # fmt: skip
    """T tokens q [T, H, nope+pe], index_q [T, Hi, Di], head_weights [T, Hi]: over the top_k rows that the indexer
    chooses of the lengths[t] (int32 [T]) that each sees, decode and prefill alike. Keys and rows of the tokens
    themselves have been written. Returns [T, H, v].
    """
    indexer, attention = by_device.dsa(q.device), by_device.mla(q.device)
    width = keys.table.shape[1] * keys.page_tokens
    codes, weights = indexer.quantize_queries(index_q, head_weights)
    chosen = indexer.top_k(indexer.scores(codes, weights, keys, lengths, width), lengths, top_k, rows)
    scale, rank = q.shape[-1] ** -0.5, w_uk.shape[-1]
    latent = attention.attend_slots(absorb(q, w_uk), rows, chosen.slots, chosen.counts, scale, rank)
    return gated(exact.head_linear(latent, w_uv.to(q.dtype)), gate)

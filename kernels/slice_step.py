"""A decode step of one group of layers (KDA layers and one sparse global one, each with its experts) on one rank.

Everything that changes from step to step is read from tensors on the device: lengths, page tables and states, in
place. So a step can be captured once and replayed; between replays only those tensors' contents change. Sums over
ranks are left out: a rank adds its own part alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.kernels import by_device, moe, norms
from forebay.kernels.kda_batch import Layer, Tokens
from forebay.kernels.mla_batch import Pages
from forebay.kernels.moe import Experts
from forebay.kernels.moe_batch import Local, Norm
from forebay.kernels.shapes import ModelShape

KEY_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaPart:
    """`into` [.., hidden]: q|k|v, decay rank, beta, output gate. states, tails and page [B] as `kda_batch.step` has."""

    into: Tensor
    decay_up: Tensor
    layer: Layer
    out: Tensor
    states: Tensor
    tails: Tensor
    page: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalPart:
    """`into`: query's latent, row's latent, shared key, output gate, index key, index head weights; `query_up`:
    queries, then index queries. rows and keys: pages of B sequences.
    """

    into: Tensor
    query_norm: Tensor
    query_up: Tensor
    row_norm: Tensor
    key_norm: tuple[Tensor, Tensor]
    w_uk: Tensor
    w_uv: Tensor
    out: Tensor
    rows: Pages
    keys: Pages


@dataclass(frozen=True, slots=True, kw_only=True)
class MoePart:
    """`into`: shared gate, shared up, latent; `out`: shared down, then the routed sum's way back."""

    router: Tensor
    bias: Tensor
    into: Tensor
    experts: Experts
    local: Local
    norm: Tensor
    out: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """`queries` fp32 [2 n, hidden]: pseudo-queries of attention and experts of each layer; norms likewise, [hidden]."""

    shape: ModelShape
    layers: Sequence[tuple[KdaPart | GlobalPart, MoePart]]
    queries: Tensor
    norms: Sequence[Tensor]


def step(of: Slice, prefix: Tensor, bank: Tensor, lengths: Tensor) -> Tensor:
    """prefix [B, hidden] after the group; bank [N, B, hidden] of finished blocks; lengths int32 [B] count the token."""
    residual, eps = by_device.attnres(prefix.device), of.shape.norm_eps
    partials = residual.inter(bank, of.queries, eps)
    output: Tensor | None = None
    for i, part in enumerate(part for layer in of.layers for part in layer):
        prefix, x = residual.merge(partials.query(i), prefix, output, of.queries[i], eps, of.norms[i], eps)
        output = _part(part, x, lengths, of.shape)
    return prefix if output is None else prefix + output


def _part(part: KdaPart | GlobalPart | MoePart, x: Tensor, lengths: Tensor, shape: ModelShape) -> Tensor:
    if isinstance(part, KdaPart):
        return _kda(part, x, shape)
    return _attend(part, x, lengths, shape) if isinstance(part, GlobalPart) else _mix(part, x, shape)


def _kda(part: KdaPart, x: Tensor, shape: ModelShape) -> Tensor:
    width = part.layer.heads * part.layer.head_dim
    widths = [3 * width, part.decay_up.shape[1], part.layer.heads, width]
    qkv, rank, beta, gate = torch.split(F.linear(x, part.into), widths, 1)
    tokens = Tokens(x=qkv, z=F.linear(rank, part.decay_up), beta=beta, gate=gate)
    return F.linear(by_device.step(tokens, part.layer, part.states, part.tails, part.page), part.out)


def _attend(part: GlobalPart, x: Tensor, lengths: Tensor, shape: ModelShape) -> Tensor:
    m, index, eps = shape.mla, shape.index, shape.latent_norm_eps
    assert index is not None
    assert m.q_rank is not None
    assert index.rope_dim == 0, "keys are not rotated"
    heads, nope, rank = part.w_uk.shape
    widths = [m.q_rank, rank, m.pe_dim, heads * m.value_dim, index.head_dim, index.heads]
    latent, row, shared, gate, key, index_weights = torch.split(F.linear(x, part.into), widths, 1)
    up = F.linear(norms.rms_norm(latent, part.query_norm, eps), part.query_up)
    query, index_query = torch.split(up, [heads * m.query_dim, index.heads * index.head_dim], 1)
    positions = lengths - 1
    slot = part.rows.slots(positions[:, None])[:, 0]
    part.rows.pool.flatten(0, 1).index_copy_(0, slot, torch.cat((norms.rms_norm(row, part.row_norm, eps), shared), 1))
    dsa = by_device.dsa(x.device)
    dsa.write_keys(norms.layer_norm(key, *part.key_norm, KEY_NORM_EPS), positions, part.keys)
    codes, weights = dsa.quantize_queries(index_query.reshape(-1, index.heads, index.head_dim), index_weights)
    scores = dsa.scores(codes, weights, part.keys, lengths, part.keys.table.shape[1] * part.keys.page_tokens)
    chosen = dsa.top_k(scores, lengths, index.top_k, part.rows)
    q = query.view(-1, heads, m.query_dim)
    absorbed = torch.bmm(q[..., :nope].transpose(0, 1), part.w_uk).transpose(0, 1)
    wide = torch.cat((absorbed, q[..., nope:]), 2)
    mla = by_device.mla(x.device)
    mixed = mla.attend_slots(wide, part.rows, chosen.slots, chosen.counts, m.query_dim**-0.5, rank)
    o = torch.bmm(mixed.transpose(0, 1), part.w_uv).transpose(0, 1).flatten(1)
    return F.linear(o * torch.sigmoid(gate), part.out)


def _mix(part: MoePart, x: Tensor, shape: ModelShape) -> Tensor:
    m = shape.moe
    shared = (part.into.shape[0] - part.norm.shape[0]) // 2
    gate, up, latent = torch.split(F.linear(x, part.into), [shared, shared, part.norm.shape[0]], 1)
    kernels = by_device.moe(x.device, part.experts)
    chosen, weights = kernels.route(x, part.router, part.bias, m.per_token, m.scaling, m.renormalize)
    both = torch.empty((len(x), part.out.shape[1]), dtype=x.dtype, device=x.device)
    both[:, :shared] = moe.glu(gate, up, shape)
    norm = Norm(part.norm, shape.latent_norm_eps)
    kernels.experts(latent, chosen, weights, part.experts, shape, part.local, norm, both[:, shared:])
    return F.linear(both, part.out)

"""The layers of a pass in fast mode: projections by cuBLAS, everything else by the kernels of the device.

Everything that changes from step to step is read from tensors on the device: lengths, page tables and states, in
place. So a decode step can be captured once and replayed; between replays only those tensors' contents change. A row's
bits may depend on the rows beside it: products choose their kernels by the number of rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.kernels import by_device, dsa, norms
from forebay.kernels.kda_batch import Layer, Tokens
from forebay.kernels.kda_plan import Plan
from forebay.kernels.mla_batch import Pages
from forebay.kernels.moe import Experts
from forebay.kernels.moe_batch import ALL, Local, Norm
from forebay.kernels.shapes import IndexShape, ModelShape

KEY_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaPart:
    """`into` [.., hidden]: q|k|v, decay rank, beta, output gate (whole, or its rank where `ups` are there). `ups`
    [2, rank, width]: the decay's and the gate's way up from ranks of one width; else `decay_up` [width, rank] alone.
    states, tails and page [B] as `kda_batch.step` has them.
    """

    into: Tensor
    decay_up: Tensor | None
    ups: Tensor | None = None
    layer: Layer
    out: Tensor
    states: Tensor
    tails: Tensor
    page: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalPart:
    """`into`: query (or its latent, where `query_up` is there), row's latent, shared key, output gate, index key, index
    head weights, each 0 wide where the shape has none; `query_up`: queries, then index queries. rows and keys: pages
    of B sequences.
    """

    into: Tensor
    query_norm: Tensor | None
    query_up: Tensor | None
    row_norm: Tensor
    key_norm: tuple[Tensor, Tensor] | None
    w_uk: Tensor
    w_uv: Tensor
    out: Tensor
    rows: Pages
    keys: Pages | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MoePart:
    """`into`: shared gate, shared up, latent (0 wide where experts read the input), router; `out`: shared down, then
    the routed sum's way back where there is a latent.
    """

    into: Tensor
    bias: Tensor
    experts: Experts
    local: Local = ALL
    norm: Tensor | None
    out: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DensePart:
    """`into`: gate, up."""

    into: Tensor
    out: Tensor


def _split(x: Tensor, widths: Sequence[int]) -> list[Tensor]:
    ends = accumulate(widths)
    return [x[:, end - width : end] for width, end in zip(widths, ends, strict=True)]


def _project(part: KdaPart, x: Tensor) -> Tokens:
    """Everything that a KDA layer takes of its input x [T, hidden]."""
    heads, width = part.layer.heads, part.layer.heads * part.layer.head_dim
    made = F.linear(x, part.into)
    if part.ups is None:
        assert part.decay_up is not None
        qkv, rank, beta, gate = _split(made, (3 * width, part.decay_up.shape[1], heads, width))
        return Tokens(x=qkv, z=F.linear(rank, part.decay_up), beta=beta, gate=gate)
    each = part.ups.shape[1]
    qkv, rank, beta, _ = _split(made, (3 * width, each, heads, each))
    # Both ranks as one batch of two: they lie `each + heads` apart in a row.
    ranks = rank.as_strided((2, len(x), each), (each + heads, made.stride(0), 1))
    z, gate = torch.bmm(ranks, part.ups).unbind()
    return Tokens(x=qkv, z=z, beta=beta, gate=gate)


def kda_step(part: KdaPart, x: Tensor) -> Tensor:
    """One token of each of B sequences: x [B, hidden]."""
    return F.linear(by_device.step(_project(part, x), part.layer, part.states, part.tails, part.page), part.out)


def kda_prefill(part: KdaPart, x: Tensor, plan: Plan, page: int) -> Tensor:
    """T tokens of the one sequence whose state lies in `page`: x [T, hidden]."""
    of, small = part.layer, by_device.layer(x.device)
    tokens = _project(part, x)
    mixed = small.short_conv(tokens.x, of.taps, part.tails[page]).view(len(x), 3, of.heads, of.head_dim)
    z = tokens.z.view(len(x), of.heads, of.head_dim)
    q, k, v = mixed.unbind(1)
    made = by_device.prefill(q, k, v, z, tokens.beta, of, plan, part.states[page, None])
    part.states[page].copy_(made.state[0])
    return F.linear(small.gated_norm(made.o, tokens.gate, of.norm_weight, of.eps), part.out)


def attend(part: GlobalPart, x: Tensor, lengths: Tensor, shape: ModelShape, start: int | None = None) -> Tensor:
    """A token of each of B sequences, or, of one sequence, all from `start` on: x [T, hidden]. lengths int32 [T] count
    each token itself.
    """
    m, eps, small = shape.mla, shape.latent_norm_eps, by_device.layer(x.device)
    heads, nope, rank = part.w_uk.shape
    query_dim = nope + m.pe_dim
    index = (0, 0) if shape.index is None else (shape.index.head_dim, shape.index.heads)
    values = heads * m.value_dim if m.out_gate else 0
    widths = (m.q_rank or heads * query_dim, rank, m.pe_dim, values, *index)
    query, row, shared, gate, key, index_weights = _split(F.linear(x, part.into), widths)
    if part.query_up is not None and part.query_norm is not None:
        query = F.linear(small.add_norm(query, (), part.query_norm, eps)[1], part.query_up)
    positions = lengths - 1
    small.write_rows(row, shared, part.row_norm, eps, positions, part.rows)
    q = query[:, : heads * query_dim].view(-1, heads, query_dim)
    if shape.index is not None:
        index_q = query[:, heads * query_dim :]
        o = _sparse(part, shape.index, q, index_q, key, index_weights, positions)
    elif start is None:
        o = _dense(part, q, lengths)
    else:
        o = by_device.mla(x.device).prefill(q, part.rows, part.w_uk, part.w_uv, start).flatten(1)
    return F.linear(o * torch.sigmoid(gate) if m.out_gate else o, part.out)


def _wide(part: GlobalPart, q: Tensor) -> Tensor:
    """q [T, H, nope+pe] with W_UK moved to it: [T, H, r+pe]."""
    nope = part.w_uk.shape[1]
    absorbed = torch.bmm(q[..., :nope].transpose(0, 1), part.w_uk).transpose(0, 1)
    return torch.cat((absorbed, q[..., nope:]), 2)


def _values(part: GlobalPart, mixed: Tensor) -> Tensor:
    """Weighted rows [T, H, r] as values [T, H v]."""
    return torch.bmm(mixed.transpose(0, 1), part.w_uv).transpose(0, 1).flatten(1)


def _dense(part: GlobalPart, q: Tensor, lengths: Tensor) -> Tensor:
    kernels, scale, rank = by_device.mla(q.device), q.shape[2] ** -0.5, part.w_uk.shape[2]
    return _values(part, kernels.attend(_wide(part, q), part.rows, lengths, scale, rank))


def _sparse(
    part: GlobalPart, index: IndexShape, q: Tensor, index_q: Tensor, key: Tensor, weights: Tensor, positions: Tensor
) -> Tensor:
    assert part.keys is not None
    assert part.key_norm is not None
    indexer, lengths = by_device.dsa(q.device), positions + 1
    rope = positions, index.rope_dim, index.rope_theta
    key = dsa.rope_half_split(norms.layer_norm(key, *part.key_norm, KEY_NORM_EPS), *rope)
    indexer.write_keys(key, positions, part.keys)
    index_q = dsa.rope_half_split(index_q.reshape(-1, index.heads, index.head_dim), *rope)
    codes, scaled = indexer.quantize_queries(index_q, weights)
    scores = indexer.scores(codes, scaled, part.keys, lengths, part.keys.table.shape[1] * part.keys.page_tokens)
    chosen = indexer.top_k(scores, lengths, index.top_k, part.rows)
    kernels, scale, rank = by_device.mla(q.device), q.shape[2] ** -0.5, part.w_uk.shape[2]
    mixed = kernels.attend_slots(_wide(part, q), part.rows, chosen.slots, chosen.counts, scale, rank)
    return _values(part, mixed)


def mix(part: MoePart, x: Tensor, shape: ModelShape, chosen_by: list[Tensor] | None = None) -> tuple[Tensor, ...]:
    """Outputs [T, hidden] whose sum is the layer's. `chosen_by` hears the experts [T, k]."""
    m, small = shape.moe, by_device.layer(x.device)
    latent = m.latent or 0
    shared = part.out.shape[1] - latent
    gate, up, inner, logits = _split(F.linear(x, part.into), (shared, shared, latent, len(part.bias)))
    chosen, weights = small.choose(logits, part.bias, m.per_token, m.scaling, m.renormalize)
    if chosen_by is not None:
        chosen_by.append(chosen)
    norm = None if part.norm is None else Norm(part.norm, shape.norm_eps)
    if not latent:
        routed = by_device.experts(x, chosen, weights, part.experts, shape, part.local, norm)
        return F.linear(small.glu(gate, up, shape), part.out), routed
    both = torch.empty((len(x), part.out.shape[1]), dtype=x.dtype, device=x.device)
    small.glu(gate, up, shape, both[:, :shared])
    by_device.experts(inner, chosen, weights, part.experts, shape, part.local, norm, both[:, shared:])
    return (F.linear(both, part.out),)


def dense(part: DensePart, x: Tensor, shape: ModelShape) -> tuple[Tensor, ...]:
    """A dense layer's output, as `mix` gives it."""
    gate, up = F.linear(x, part.into).chunk(2, dim=1)
    return (F.linear(by_device.layer(x.device).glu(gate, up, shape), part.out),)

"""Does exact mode hold on this machine? Every row of every operator, at a model's own shape, computed alone, among
others and at other places, must be the same bits. What a machine's libraries do is measured, not believed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.kernels import attnres, conv, dsa, exact, kda, mla, moe, mxfp4, norms
from forebay.kernels.shapes import ModelShape

TOKENS = 160
COUNTS = (1, 2, 3, 7, 9, 33)
STARTS = (0, 5, 16, 77)
PAST = 2 * mla.PREFILL_TILE


@dataclass(frozen=True, slots=True)
class _Check:
    """`run(first, end)` computes rows first .. end-1 of `tokens`; `grid`: a first row must be a multiple of it."""

    name: str
    run: Callable[[int, int], Tensor]
    grid: int = 1

    def holds(self) -> bool:
        whole = self.run(0, TOKENS)
        parts = ((first, first + n) for first in STARTS if first % self.grid == 0 for n in (*COUNTS, TOKENS - first))
        return all(torch.equal(self.run(a, b), whole[a:b]) for a, b in parts if b <= TOKENS)


def probe(shape: ModelShape, threads: int, device: str = "cpu") -> list[str]:
    """Names of the operators that break exact mode with this many threads on this device; [] is good. Takes
    about a second on a small shape, and memory for one matrix of each kind."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode(), torch.device(device):
            random = torch.Generator(device).manual_seed(20)
            makers = (_row_checks, _kda_checks, _global_checks, _index_checks, _moe_checks, _residual_checks)
            return [check.name for make in makers for check in make(shape, random) if not check.holds()]
    finally:
        torch.set_num_threads(before)


def _row_checks(shape: ModelShape, random: torch.Generator) -> Iterator[_Check]:
    x = torch.randn(TOKENS, shape.hidden, generator=random) * 3
    weight = torch.rand(shape.hidden, generator=random)
    for name, f in (("sigmoid", exact.sigmoid), ("silu", exact.silu), ("softplus", exact.softplus)):
        yield _Check(name, lambda a, b, f=f: f(x[a:b]))  # type: ignore[misc]
    yield _Check("rms_norm", lambda a, b: norms.rms_norm(x[a:b], weight, shape.norm_eps))
    yield _Check("layer_norm", lambda a, b: norms.layer_norm(x[a:b], weight, weight, shape.norm_eps))
    for rows, width in sorted(_matrices(shape)):
        w = torch.randn(rows, width, generator=random)
        y = torch.randn(TOKENS, width, generator=random)
        yield _Check(f"linear {width} to {rows}", lambda a, b, w=w, y=y: exact.linear(y[a:b], w))  # type: ignore[misc]


def _matrices(shape: ModelShape) -> set[tuple[int, int]]:
    """(out, in) of the matrices that a token's row goes through."""
    k, m, hidden = shape.kda, shape.mla, shape.hidden
    into = (k.width, k.gate_rank, k.heads, m.q_rank or m.heads * m.query_dim, m.row_elements, shape.moe.experts)
    outputs = {(rows, hidden) for rows in (*into, shape.moe.shared_width, shape.dense_width, min(shape.vocab, 8192))}
    inner = {(hidden, k.width), (k.width, k.gate_rank), (hidden, shape.moe.shared_width), (hidden, shape.dense_width)}
    if m.q_rank is not None:
        inner.add((m.heads * m.query_dim, m.q_rank))
    return outputs | inner | {(hidden, m.heads * m.value_dim)}


def _kda_checks(shape: ModelShape, random: torch.Generator) -> Iterator[_Check]:
    heads, dim, width = shape.kda.heads, shape.kda.head_dim, shape.kda.conv_width
    q, k, v, z = torch.randn(4, TOKENS, heads, dim, generator=random)
    beta = torch.rand(TOKENS, heads, generator=random)
    A_log, bias = torch.randn(heads, generator=random), torch.randn(heads * dim, generator=random)
    g = kda.gate(z, A_log, bias, shape.kda.gate, shape.kda.gate_lower_bound)
    state = torch.randn(heads, dim, dim, generator=random)
    states = state.expand(TOKENS, -1, -1, -1).contiguous()
    x = torch.randn(TOKENS, 3 * shape.kda.width, generator=random)
    weight = torch.randn(x.shape[1], width, generator=random)
    history = torch.cat((torch.zeros(width - 1, x.shape[1]), x))
    tails = torch.stack([history[t : t + width - 1] for t in range(TOKENS)])
    norm = torch.rand(dim, generator=random)

    def chunk(a: int, b: int) -> tuple[Tensor, Tensor]:
        before = kda.chunk(q[:a], k[:a], v[:a], g[:a], beta[:a], state)[1] if a else state
        return kda.chunk(q[a:b], k[a:b], v[a:b], g[a:b], beta[a:b], before)

    def resumed_state(a: int, b: int) -> Tensor:
        """The state at the end of everything, with the prefill cut at `a`; repeated, for one row a token."""
        return chunk(a, TOKENS)[1][None].expand(b - a, -1, -1, -1)

    def step(a: int, b: int) -> tuple[Tensor, Tensor]:
        return kda.step(q[a:b], k[a:b], v[a:b], g[a:b], beta[a:b], states[a:b])

    yield _Check("kda.gate", lambda a, b: kda.gate(z[a:b], A_log, bias, shape.kda.gate, shape.kda.gate_lower_bound))
    yield _Check("kda.chunk", lambda a, b: chunk(a, b)[0], kda.CHUNK)
    yield _Check("kda.chunk state", resumed_state, kda.CHUNK)
    yield _Check("kda.step", lambda a, b: step(a, b)[0])
    yield _Check("kda.step state", lambda a, b: step(a, b)[1])
    yield _Check("short_conv", lambda a, b: conv.short_conv(x[a:b], weight, tails[a])[0])
    yield _Check("short_conv_step", lambda a, b: conv.short_conv_step(x[a:b], weight, tails[a:b])[0])
    yield _Check("l2_norm", lambda a, b: norms.l2_norm(q[a:b]))
    yield _Check("gated_rms_norm", lambda a, b: norms.gated_rms_norm(v[a:b], z[a:b], norm, shape.norm_eps))


def _global_checks(shape: ModelShape, random: torch.Generator) -> Iterator[_Check]:
    m = shape.mla
    q = torch.randn(TOKENS, m.heads, m.query_dim, generator=random)
    past = torch.randn(PAST + TOKENS, m.row_elements, generator=random)
    rows = past[:TOKENS]
    w_uk = torch.randn(m.heads, m.nope_dim, m.kv_rank, generator=random) * m.kv_rank**-0.5
    w_uv = torch.randn(m.heads, m.kv_rank, m.value_dim, generator=random) * m.kv_rank**-0.5
    lengths = torch.arange(1, TOKENS + 1)

    def decode(a: int, b: int) -> Tensor:
        """Each batch is padded to its own longest sequence, as a decode step pads it."""
        return mla.attend_decode(q[a:b], rows[:b].expand(b - a, -1, -1), lengths[a:b], w_uk, w_uv)

    def sparse(a: int, b: int) -> Tensor:
        idx = torch.arange(b).expand(b - a, -1)
        idx = idx.masked_fill(idx >= lengths[a:b, None], -1)
        return dsa.sparse_attend(q[a:b], rows[idx.clamp(min=0)], idx, w_uk, w_uv)

    yield _Check("mla.attend_prefill", lambda a, b: mla.attend_prefill(q[a:b], past[: PAST + b], w_uk, w_uv, PAST + a))
    yield _Check("mla.attend_decode", decode)
    yield _Check("dsa.sparse_attend", sparse)


def _index_checks(shape: ModelShape, random: torch.Generator) -> Iterator[_Check]:
    index = shape.index
    if index is None:
        return
    q = torch.randn(TOKENS, index.heads, index.head_dim, generator=random)
    w, keys = torch.randn(TOKENS, index.heads, generator=random), torch.randn(TOKENS, index.head_dim, generator=random)
    positions, lengths = torch.arange(TOKENS), torch.arange(1, TOKENS + 1)

    def widened(scores: Tensor) -> Tensor:
        return torch.nn.functional.pad(scores, (0, TOKENS - scores.shape[1]), value=float("-inf"))

    def prefill(a: int, b: int) -> Tensor:
        return widened(dsa.index_scores(q[a:b], w[a:b], keys[:b], a))

    def decode(a: int, b: int) -> Tensor:
        return widened(dsa.index_scores_decode(q[a:b], w[a:b], keys[:b].expand(b - a, -1, -1), lengths[a:b]))

    def rope(a: int, b: int) -> Tensor:
        return dsa.rope_half_split(q[a:b], positions[a:b], index.rope_dim or index.head_dim, index.rope_theta)

    yield _Check("dsa.index_scores", prefill)
    yield _Check("dsa.index_scores_decode", decode)
    yield _Check("dsa.top_k", lambda a, b: dsa.top_k(prefill(a, b), min(index.top_k, TOKENS // 2)))
    yield _Check("dsa.rope_half_split", rope)
    yield _Check("dsa.quantize_keys", lambda a, b: dsa.dequantize_keys(dsa.quantize_keys(keys[a:b])))


def _moe_checks(shape: ModelShape, random: torch.Generator) -> Iterator[_Check]:
    """Over a few experts: more of them are the same products again."""
    m = shape.moe
    count, latent = max(m.per_token + 1, min(m.experts, 16)), m.latent or shape.hidden
    x, z = torch.randn(TOKENS, shape.hidden, generator=random), torch.randn(TOKENS, latent, generator=random)
    gate_w, bias = torch.randn(count, shape.hidden, generator=random), torch.randn(count, generator=random) * 0.1

    def weights(out: int, into: int) -> moe.Dense | moe.Packed:
        w = torch.randn(count, out, into, generator=random) * into**-0.5
        return moe.Packed(*mxfp4.quantize(w)) if m.expert_format == "mxfp4" else moe.Dense(w)

    w = moe.Experts(w1=weights(m.width, latent), w3=weights(m.width, latent), w2=weights(latent, m.width))

    def route(a: int, b: int) -> tuple[Tensor, Tensor]:
        return moe.route(x[a:b], gate_w, bias, m.per_token, m.scaling, m.renormalize)

    yield _Check("moe.route", lambda a, b: torch.cat(route(a, b), dim=1))
    yield _Check("moe.experts", lambda a, b: moe.experts(z[a:b], *route(a, b), w, shape))
    yield _Check("moe.glu", lambda a, b: moe.glu(z[a:b], z[a:b], shape))


def _residual_checks(shape: ModelShape, random: torch.Generator) -> Iterator[_Check]:
    block = shape.attn_res_block
    if block is None:
        return
    queries = torch.randn(2 * block, shape.hidden, generator=random)
    p = torch.randn(TOKENS, shape.hidden, generator=random)
    for blocks in range(1, -(-shape.layers // block) + 1):
        bank = torch.randn(blocks, TOKENS, shape.hidden, generator=random)

        def mix(a: int, b: int, bank: Tensor = bank) -> Tensor:
            partials = attnres.inter(bank[:, a:b], queries, shape.norm_eps)
            return attnres.merge(partials.query(1), p[a:b], queries[1], shape.norm_eps)

        yield _Check(f"attnres over {blocks} blocks", mix)

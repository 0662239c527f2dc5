"""Slow twins of the operators, same signatures, written like the papers: loops over tokens, dense masks, no chunks or
tiles.

They compute in the dtype of their inputs, so that a float64 run is the gold standard for the fast forms.
"""

import math

import torch
from torch import Tensor

from forebay.kernels import mxfp4
from forebay.kernels.moe import Experts
from forebay.kernels.shapes import Gate, ModelShape

# --- Kimi Delta Attention


def gate(z: Tensor, A_log: Tensor, dt_bias: Tensor, kind: Gate, lower_bound: float) -> Tensor:
    raw = A_log.exp()[:, None]
    shifted = z + dt_bias.view(z.shape[1:])
    return (
        lower_bound * torch.sigmoid(raw * shifted)
        if kind == "bounded"
        else -raw * torch.logaddexp(shifted, shifted * 0)
    )


def short_conv(x: Tensor, weight: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
    history, width = torch.cat((tail, x)), weight.shape[1]
    rows = [torch.einsum("wc,cw->c", history[t : t + width], weight) for t in range(len(x))]
    y = torch.stack(rows)
    return y * torch.sigmoid(y), history[len(x) :]


def short_conv_step(x: Tensor, weight: Tensor, tails: Tensor) -> tuple[Tensor, Tensor]:
    pairs = [short_conv(x[b : b + 1], weight, tails[b]) for b in range(len(x))]
    return torch.cat([y for y, _ in pairs]), torch.stack([tail for _, tail in pairs])


def _unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    q, k = _unit(q) * q.shape[-1] ** -0.5, _unit(k)
    state = g.exp()[..., None] * state
    u = beta[..., None] * (v - torch.einsum("bhkv,bhk->bhv", state, k))
    state = state + torch.einsum("bhk,bhv->bhkv", k, u)
    return torch.einsum("bhkv,bhk->bhv", state, q), state


def recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """`kda.chunk`, token by token."""
    outputs, states = [], state[None]
    for t in range(len(q)):
        o, states = step(q[t, None], k[t, None], v[t, None], g[t, None], beta[t, None], states)
        outputs.append(o)
    return torch.cat(outputs), states[0]


def chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, size: int = 16
) -> tuple[Tensor, Tensor]:
    """`kda.chunk` as its formulas stand: one head and one chunk at a time, (I + A) inverted as a matrix."""
    tokens, heads, key_dim = q.shape
    q, k = _unit(q) * key_dim**-0.5, _unit(k)
    outputs, states = torch.empty_like(v), []
    for h in range(heads):
        S = state[h]
        for first in range(0, tokens, size):
            part = slice(first, min(first + size, tokens))
            outputs[part, h], S = _chunk(q[part, h], k[part, h], v[part, h], g[part, h], beta[part, h], S)
        states.append(S)
    return outputs, torch.stack(states)


def _chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    G = g.cumsum(0)
    D = (G[:, None] - G[None]).clamp(max=0.0).exp()
    A = (beta[:, None] * torch.einsum("id,jd,ijd->ij", k, k, D)).tril(-1)
    P = torch.einsum("id,jd,ijd->ij", q, k, D).tril()
    inverse = torch.linalg.inv(torch.eye(len(q), dtype=q.dtype) + A)
    U = inverse @ (beta[:, None] * (v - (k * G.exp()) @ S))
    return (q * G.exp()) @ S + P @ U, G[-1].exp()[:, None] * S + (k * D[-1]).T @ U


# --- Global attention


def attend_prefill(q: Tensor, rows: Tensor, w_uk: Tensor, w_uv: Tensor, start: int) -> Tensor:
    return torch.stack([_attend(q[t], rows[: start + t + 1], w_uk, w_uv) for t in range(len(q))])


def attend_decode(q: Tensor, rows: Tensor, lengths: Tensor, w_uk: Tensor, w_uv: Tensor) -> Tensor:
    return torch.stack([_attend(q[b], rows[b, : lengths[b]], w_uk, w_uv) for b in range(len(q))])


def sparse_attend(q: Tensor, rows: Tensor, idx: Tensor, w_uk: Tensor, w_uv: Tensor) -> Tensor:
    return torch.stack([_attend(q[t], rows[t][idx[t] >= 0], w_uk, w_uv) for t in range(len(q))])


def _attend(q: Tensor, rows: Tensor, w_uk: Tensor, w_uv: Tensor) -> Tensor:
    """One query [H, nope+pe] over rows [S, r+pe], all visible: keys and values expanded per head, one dense softmax."""
    latent, shared = rows[:, : w_uk.shape[-1]], rows[:, w_uk.shape[-1] :]
    outputs = []
    for h in range(len(q)):
        keys = torch.cat((latent @ w_uk[h].T, shared), dim=1)
        p = torch.softmax(keys @ q[h] * q.shape[-1] ** -0.5, dim=0)
        outputs.append(p @ (latent @ w_uv[h]))
    return torch.stack(outputs)


def index_scores(q: Tensor, w: Tensor, keys: Tensor, start: int) -> Tensor:
    scores = torch.full((len(q), len(keys)), -math.inf, dtype=q.dtype)
    for t in range(len(q)):
        scores[t, : start + t + 1] = _index(q[t], w[t], keys[: start + t + 1])
    return scores


def index_scores_decode(q: Tensor, w: Tensor, keys: Tensor, lengths: Tensor) -> Tensor:
    scores = torch.full(keys.shape[:2], -math.inf, dtype=q.dtype)
    for b, length in enumerate(lengths.tolist()):
        scores[b, :length] = _index(q[b], w[b], keys[b, :length])
    return scores


def _index(q: Tensor, w: Tensor, keys: Tensor) -> Tensor:
    heads, dim = q.shape
    weighted: Tensor = (keys @ q.T * dim**-0.5).relu() * w * heads**-0.5
    return weighted.sum(dim=1)


def top_k(scores: Tensor, k: int) -> Tensor:
    chosen = []
    for row in scores.tolist():
        best = sorted((-score, s) for s, score in enumerate(row) if score > -math.inf)[:k]
        positions = sorted(s for _, s in best)
        chosen.append(positions + [-1] * (k - len(positions)))
    return torch.tensor(chosen, dtype=torch.int64).view(len(scores), k)


def rope_half_split(x: Tensor, positions: Tensor, rope_dim: int, theta: float) -> Tensor:
    """Each pair (i, i + rope_dim/2) as a complex number, turned by position * theta^(-2i/rope_dim)."""
    y, half = x.clone(), rope_dim // 2
    for i in range(half):
        turn = torch.polar(torch.ones(len(x), dtype=x.dtype), positions.to(x.dtype) * theta ** (-2 * i / rope_dim))
        turned = torch.complex(x[..., i], x[..., i + half]) * turn.view(-1, *(1,) * (x.dim() - 2))
        y[..., i], y[..., i + half] = turned.real, turned.imag
    return y


# --- Experts


def unpack(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """One matrix [out, in], nibble by nibble."""
    rows = [
        [
            mxfp4.CODES[code] * _power(row_scale[2 * i // 32])
            for i, byte in enumerate(row)
            for code in (byte & 15, byte >> 4)
        ]
        for row, row_scale in zip(packed.tolist(), scale.tolist(), strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64).to(dtype)


def _power(byte: int) -> float:
    return math.nan if byte == 255 else 2.0 ** (byte - 127)


def glu(gate: Tensor, up: Tensor, shape: ModelShape) -> Tensor:
    if shape.activation == "silu":
        return gate * torch.sigmoid(gate) * up
    b, c = shape.situ_beta, shape.situ_linear_beta
    return b * torch.tanh(gate / b) * torch.sigmoid(gate) * c * torch.tanh(up / c)


def route(x: Tensor, gate_w: Tensor, bias: Tensor, k: int, scaling: float, renormalize: bool) -> tuple[Tensor, Tensor]:
    scores = torch.sigmoid(x @ gate_w.T)
    chosen = top_k(scores + bias, k)
    weights = torch.stack([row[ids] for row, ids in zip(scores, chosen, strict=True)])
    if renormalize:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return chosen, weights * scaling


def experts(z: Tensor, chosen: Tensor, weights: Tensor, w: Experts, shape: ModelShape) -> Tensor:
    total = torch.zeros_like(z)
    for t in range(len(z)):
        for e, weight in zip(chosen[t], weights[t], strict=True):
            w1, w3, w2 = (part.of(e[None])[0].to(z.dtype) for part in (w.w1, w.w3, w.w2))
            total[t] += weight * (w2 @ glu(w1 @ z[t], w3 @ z[t], shape))
    return total


# --- Attention residuals


def mix(sources: Tensor, w: Tensor, eps: float) -> Tensor:
    """`attnres.inter` and `attnres.merge` in one: sources [N, T, D], the bank and then the running prefix, with one
    pseudo-query w [D]: [T, D]."""
    scores = (sources / (sources.square().mean(-1, keepdim=True) + eps).sqrt()) @ w
    return torch.einsum("nt,ntd->td", torch.softmax(scores, dim=0), sources)

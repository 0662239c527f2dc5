"""KDA over batches, in torch: the slow twins of the CUDA kernels, and what runs where there is no CUDA device.

Prefill takes N sequences packed in T tokens; decode and replay take states and convolution tails where they lie, in
pages. States are [.., H, K, V] fp32 and K = V = D everywhere.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.kernels import conv, exact, kda, norms
from forebay.kernels.kda_plan import Plan
from forebay.kernels.shapes import Gate


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The small weights of one KDA layer: taps [W, 3 H D] (q|k|v, the transposed convolution weight), A_log [H],
    dt_bias [H D], norm_weight [D].
    """

    heads: int
    head_dim: int
    taps: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm_weight: Tensor
    gate: Gate = "bounded"
    lower_bound: float = -5.0
    eps: float = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Projected inputs of one token of each of B sequences, or [B, n, ..] of n: x [.., 3 H D] q|k|v before the
    convolution, z [.., H D] raw gate, beta [.., H] logits, gate [.., H D] output gate logits.
    """

    x: Tensor
    z: Tensor
    beta: Tensor
    gate: Tensor

    def at(self, n: int, t: int) -> "Tokens":
        """Token t of sequence n, as a batch of one."""
        return Tokens(
            x=self.x[n, t, None], z=self.z[n, t, None], beta=self.beta[n, t, None], gate=self.gate[n, t, None]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """o [T, H, D]; state [N, H, D, D] after each sequence; checkpoints [slots, H, D, D] in the plan's order."""

    o: Tensor
    state: Tensor
    checkpoints: Tensor


def prefill(
    q: Tensor, k: Tensor, v: Tensor, z: Tensor, beta: Tensor, layer: Layer, plan: Plan, state: Tensor | None
) -> Prefilled:
    """q, k, v after convolution and SiLU, z raw gate [T, H, D], beta logits [T, H], state [N, H, D, D] or None (0)."""
    H, D = layer.heads, layer.head_dim
    g = kda.gate(z, layer.A_log, layer.dt_bias, layer.gate, layer.lower_bound)
    b = exact.sigmoid(beta.float())
    if state is None:
        state = torch.zeros(len(plan.lengths), H, D, D, device=q.device)
    o = torch.empty_like(v)
    finals, kept = [], []
    ends = _ends(plan)
    first = 0
    for n, length in enumerate(plan.lengths):
        S = state[n]
        while first < (stop := sum(plan.lengths[:n]) + length):
            end = min([e for e in ends if first < e <= stop] or [stop])
            part = slice(first, end)
            o[part], S = kda.chunk(q[part], k[part], v[part], g[part], b[part], S)
            kept += [S] if end in ends else []
            first = end
        finals.append(S)
    return Prefilled(o=o, state=torch.stack(finals), checkpoints=torch.stack(kept) if kept else state[:0])


def _ends(plan: Plan) -> set[int]:
    """Packed token positions behind which a checkpoint is kept."""
    tables = (plan.chunk_start, plan.chunk_rows, plan.chunk_slot)
    return {start + rows for start, rows, slot in zip(*(t.tolist() for t in tables), strict=True) if slot >= 0}


def step(tokens: Tokens, layer: Layer, states: Tensor, tails: Tensor, page: Tensor) -> Tensor:
    """One token of each of B sequences: states [pages, H, D, D] and tails [pages, W-1, 3 H D] change in place at page
    [B]; returns o [B, H D] after norm and output gate.
    """
    H, D = layer.heads, layer.head_dim
    index = page.long()
    y, tail = conv.short_conv_step(tokens.x, layer.taps.t(), tails[index])
    q, k, v = y.view(-1, 3, H, D).unbind(1)
    g = kda.gate(tokens.z.view(-1, H, D), layer.A_log, layer.dt_bias, layer.gate, layer.lower_bound)
    o, state = kda.step(q, k, v, g, exact.sigmoid(tokens.beta.float()), states[index])
    states[index] = state
    tails[index] = tail.to(tails.dtype)
    return norms.gated_rms_norm(o, tokens.gate.view(-1, H, D), layer.norm_weight, layer.eps).flatten(1)


def replay(
    tokens: Tokens, drafted: int, accepted: Tensor, layer: Layer, states: Tensor, tails: Tensor, page: Tensor
) -> Tensor:
    """Plain decode, token by token: the first accepted[n] of `drafted` tokens change the page of sequence n; the tokens
    behind the drafted ones run on from there and change nothing. Returns their o [B, window, H D].
    """
    outputs = []
    for n, count in enumerate(accepted.tolist()):
        own = page[n, None]
        for t in range(count):
            step(tokens.at(n, t), layer, states, tails, own)
        zero = torch.zeros_like(own)
        S, tail = states[own.long()].clone(), tails[own.long()].clone()
        window = range(drafted, tokens.x.shape[1])
        outputs.append([step(tokens.at(n, t), layer, S, tail, zero)[0] for t in window])
    return torch.stack([torch.stack(o) if o else tokens.gate[0, :0] for o in outputs])

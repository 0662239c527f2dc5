"""Mixture of experts: sigmoid router with a frozen bias, gated linear units, routed experts kept as released (plain or
MXFP4).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.kernels import dsa, exact, mxfp4
from forebay.kernels.shapes import ModelShape

GROUP_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Dense:
    """Weights of all experts [E, out, in]."""

    weight: Tensor

    @property
    def expert_elements(self) -> int:
        return self.weight.shape[1] * self.weight.shape[2]

    def of(self, experts: Tensor) -> Tensor:
        """The weights [n, out, in] of n experts, fp32 or bf16."""
        return self.weight.index_select(0, experts)


@dataclass(frozen=True, slots=True)
class Packed:
    """MXFP4 weights of all experts: packed uint8 [E, out, in/2], scale uint8 [E, out, in/32]. Unpacked as used."""

    packed: Tensor
    scale: Tensor

    @property
    def expert_elements(self) -> int:
        return self.packed.shape[1] * self.packed.shape[2] * 2

    def of(self, experts: Tensor) -> Tensor:
        """The weights [n, out, in] of n experts, fp32."""
        return mxfp4.unpack(self.packed.index_select(0, experts), self.scale.index_select(0, experts))


@dataclass(frozen=True, slots=True)
class Experts:
    """w1 the gate, w3 the up, w2 the down projection of every routed expert."""

    w1: Dense | Packed
    w3: Dense | Packed
    w2: Dense | Packed


def glu(gate: Tensor, up: Tensor, shape: ModelShape) -> Tensor:
    """silu(gate) * up, or SiTU: [b tanh(gate/b) sigmoid(gate)] * [c tanh(up/c)] with b, c from the shape (|result| < b
    c); in fp32.
    """
    g, u = gate.float(), up.float()
    if shape.activation == "silu":
        return (exact.silu(g) * u).to(gate.dtype)
    b, c = shape.situ_beta, shape.situ_linear_beta
    return (torch.tanh(g / b) * torch.tanh(u / c) * (b * c) / (torch.exp(-g) + 1.0)).to(gate.dtype)


def route(x: Tensor, gate_w: Tensor, bias: Tensor, k: int, scaling: float, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The k experts of each token x [T, D], ascending int64 [T, k], and their weights fp32 [T, k].

    gate_w [E, D], bias [E] (it takes part in the choice, never in the weights).
    """
    return choose(exact.linear(x.float(), gate_w.float()), bias, k, scaling, renormalize)


def choose(logits: Tensor, bias: Tensor, k: int, scaling: float, renormalize: bool) -> tuple[Tensor, Tensor]:
    """`route` from the router's logits [T, E]."""
    scores = exact.sigmoid(logits.float())
    chosen = dsa.top_k(scores + bias.float(), k)
    weights = scores.gather(1, chosen)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * scaling


def experts(z: Tensor, chosen: Tensor, weights: Tensor, w: Experts, shape: ModelShape) -> Tensor:
    """sum_e weight_e * w2_e glu(w1_e z, w3_e z) for z [T, L], chosen and weights [T, k] of `route`: [T, L], added by
    rising expert id.

    Each expert's rows stand in a slab of a multiple of 8 rows, equal for all experts, so one bmm serves all of them.
    """
    tokens, k = chosen.shape
    order = chosen.flatten().argsort(stable=True)
    used, place, counts = torch.unique_consecutive(
        chosen.flatten().index_select(0, order), return_inverse=True, return_counts=True
    )
    slab = -(-int(counts.max()) // exact.ROWS) * exact.ROWS
    first = counts.cumsum(0) - counts
    place = place * slab + torch.arange(len(order), device=z.device) - first.index_select(0, place)
    rows = z.new_zeros(len(used) * slab, z.shape[1])
    rows.index_copy_(0, place, z.index_select(0, order // k))
    out = _slabs(rows.view(len(used), slab, -1), used, w, shape).view(len(used) * slab, -1)
    per_choice = torch.empty(tokens * k, out.shape[1], dtype=torch.float32, device=z.device)
    per_choice.index_copy_(0, order, out.index_select(0, place).float())
    return (per_choice.view(tokens, k, -1) * weights[..., None]).sum(1).to(z.dtype)


def _slabs(rows: Tensor, used: Tensor, w: Experts, shape: ModelShape) -> Tensor:
    """rows [n, slab, L] through their experts `used` [n]; weights are unpacked for a bounded number of experts at a
    time.
    """
    group = max(1, GROUP_BYTES // (4 * 3 * w.w1.expert_elements))
    parts = []
    for ids, part in zip(torch.split(used, group), torch.split(rows, group), strict=True):
        gate = exact.bmm(part, w.w1.of(ids).to(part.dtype).transpose(1, 2))
        up = exact.bmm(part, w.w3.of(ids).to(part.dtype).transpose(1, 2))
        parts.append(exact.bmm(glu(gate, up, shape), w.w2.of(ids).to(part.dtype).transpose(1, 2)))
    return torch.cat(parts)

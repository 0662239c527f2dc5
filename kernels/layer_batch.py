"""The small operators between a layer's large ones, in torch: the slow twins of the CUDA kernels, and what runs where
there is no CUDA device.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from forebay.kernels import conv, moe, norms
from forebay.kernels.mla_batch import Pages
from forebay.kernels.shapes import ModelShape


def add_norm(prefix: Tensor, outputs: Sequence[Tensor], weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """prefix [T, D] plus the sum of up to two outputs, rounded after each addition, and its `norms.rms_norm`."""
    if outputs:
        prefix = prefix + (outputs[0] if len(outputs) == 1 else outputs[0] + outputs[1])
    return prefix, norms.rms_norm(prefix, weight, eps)


def glu(gate: Tensor, up: Tensor, shape: ModelShape, out: Tensor | None = None) -> Tensor:
    """`moe.glu` [T, W]; into `out` where given, whose rows may lie apart."""
    made = moe.glu(gate, up, shape)
    return made if out is None else out.copy_(made)


def write_rows(latent: Tensor, shared: Tensor, weight: Tensor, eps: float, positions: Tensor, pages: Pages) -> None:
    """The rows (RMSNorm(latent [T, r]), shared [T, pe]) of tokens at positions int32 [T] of their sequences."""
    slots = pages.slots(positions[:, None])[:, 0]
    rows = torch.cat((norms.rms_norm(latent, weight, eps), shared), dim=1)
    pages.pool.flatten(0, 1).index_copy_(0, slots, rows.to(pages.pool.dtype))


def short_conv(x: Tensor, taps: Tensor, tail: Tensor) -> Tensor:
    """`conv.short_conv` of one sequence's x [T, C] with taps [W, C]; tail [W-1, C] moves on in place."""
    y, after = conv.short_conv(x, taps.t(), tail)
    tail.copy_(after)
    return y


def gated_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`norms.gated_rms_norm` of o [T, H, D] by gate [T, H D]: [T, H D]."""
    return norms.gated_rms_norm(o, gate.reshape(o.shape), weight, eps).flatten(1)


def choose(logits: Tensor, bias: Tensor, k: int, scaling: float, renormalize: bool) -> tuple[Tensor, Tensor]:
    """`moe.route` from its logits [T, E]: experts int32 [T, k] rising, weights fp32 [T, k]."""
    chosen, weights = moe.choose(logits, bias, k, scaling, renormalize)
    return chosen.int(), weights

"""Routed experts over a batch, in torch: the slow twins of the CUDA kernels, and what runs where there is no CUDA
device.
"""

from dataclasses import dataclass

from torch import Tensor

from forebay.kernels import moe, norms
from forebay.kernels.moe import Experts
from forebay.kernels.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class Local:
    """Which of a layer's experts are here: those from `first` on, as many as there are weights, `of` so many in all
    (None: all are here). A rank adds its experts' part; the ranks' parts make the sum.
    """

    first: int = 0
    of: int | None = None


ALL = Local()


@dataclass(frozen=True, slots=True)
class Norm:
    """`norms.rms_norm` of the sum."""

    weight: Tensor
    eps: float


def route(x: Tensor, gate_w: Tensor, bias: Tensor, k: int, scaling: float, renormalize: bool) -> tuple[Tensor, Tensor]:
    """`moe.route`, ids int32."""
    chosen, weights = moe.route(x, gate_w, bias, k, scaling, renormalize)
    return chosen.int(), weights


def experts(
    z: Tensor,
    chosen: Tensor,
    weights: Tensor,
    w: Experts,
    shape: ModelShape,
    local: Local = ALL,
    norm: Norm | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`moe.experts` of the experts that are here, then the norm; into `out` [T, L] where given, whose rows may lie
    apart. chosen int32 [T, k] rising.
    """
    count = (w.w1.packed if isinstance(w.w1, moe.Packed) else w.w1.weight).shape[0]
    ids = chosen.long() - local.first
    here = (ids >= 0) & (ids < count)
    made = moe.experts(z, ids.clamp(0, count - 1), weights * here, w, shape)
    if norm is not None:
        made = norms.rms_norm(made, norm.weight, norm.eps)
    return made if out is None else out.copy_(made)

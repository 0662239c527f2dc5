"""Attention residuals of a step, in torch: the slow twins of the CUDA kernels, and what runs where there is no CUDA
device.
"""

from torch import Tensor

from forebay.kernels import attnres, norms
from forebay.kernels.attnres import Partials


def inter(bank: Tensor, ws: Tensor, eps: float) -> Partials:
    """`attnres.inter`: bank [N, T, D] (N may be 0) against the pseudo-queries ws [Q, D] fp32."""
    return attnres.inter(bank, ws, eps)


def merge(
    partial: Partials, prefix: Tensor, output: Tensor | None, w: Tensor, eps: float, norm: Tensor, norm_eps: float
) -> tuple[Tensor, Tensor]:
    """A sublayer's output joins the running prefix, and the next sublayer's input comes of it: the new prefix [T, D]
    (prefix + output, rounded to its dtype) and `norms.rms_norm` by norm [D] of its mix with one pseudo-query's
    partials (`attnres.merge`).
    """
    grown = prefix if output is None else prefix + output
    return grown, norms.rms_norm(attnres.merge(partial, grown, w, eps), norm, norm_eps)

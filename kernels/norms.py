"""Normalisations. All compute in fp32 and return the dtype of their first argument."""

import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.kernels import exact


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] over its root mean square, times weight [D]; rounded to x's dtype before the weight, as released code
    does.
    """
    x32 = x.float()
    normed = x32 * torch.rsqrt(exact.mean_square(x32) + eps)
    return normed.to(x.dtype) * weight.to(x.dtype)


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x [..., D] / sqrt(sum x^2 + eps): eps stands inside the root, so a zero row stays zero and a tiny one stays
    tiny.
    """
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def gated_rms_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """KDA's output: RMSNorm of o [..., H, V] by weight [V], then times sigmoid(gate [..., H, V]); norm before gate."""
    o32 = o.float()
    normed = o32 * torch.rsqrt(exact.mean_square(o32) + eps) * weight.float()
    return (normed * exact.sigmoid(gate.float())).to(gate.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x [..., D] centred and scaled to unit variance, times weight [D], plus bias [D]."""
    return F.layer_norm(x.float(), (x.shape[-1],), weight.float(), bias.float(), eps).to(x.dtype)

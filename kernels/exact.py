"""Exact mode's building blocks: a row's result never depends on the rows beside it, nor on where it stands.

Measured on x86 with MKL and oneDNN, fp32: a GEMM of 1, 2, 3 or 7 rows takes another path than a larger one and differs
in the last bits, one of a multiple of 8 rows never did; `torch.sigmoid`, `silu` and `softplus` run other code at the
end of a vector than in its body, while exp, log1p, tanh, sums and cumsum along a row do not. `probe.py` checks all of
it again on the machine at hand.
"""

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 8


def pad_rows(x: Tensor, multiple: int = ROWS) -> Tensor:
    """x [..., M, D] with zero rows appended until M is a multiple of `multiple`."""
    missing = -x.shape[-2] % multiple
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def linear(x: Tensor, w: Tensor) -> Tensor:
    """x [..., in] times w [out, in] transposed: [..., out], in the dtype of x."""
    flat = (x if x.dim() == 2 else x.reshape(-1, x.shape[-1])).contiguous()
    kernels = _kernels(x.device)
    rows = F.linear(pad_rows(flat), w)[: flat.shape[0]] if kernels is None else kernels.bmm(flat[None], w.t()[None])[0]
    return rows if x.dim() == 2 else rows.reshape(*x.shape[:-1], w.shape[0])


def head_linear(x: Tensor, w: Tensor) -> Tensor:
    """x [T, H, in] times each head's w [H, in, out]: [T, H, out]."""
    return bmm(pad_rows(x.transpose(0, 1)), w)[:, : x.shape[0]].transpose(0, 1)


def bmm(x: Tensor, w: Tensor) -> Tensor:
    """x [N, M, K] times w [N, K, P]; on a CPU the caller keeps M a multiple of 8 or the same."""
    kernels = _kernels(x.device)
    made: Tensor = torch.bmm(x, w) if kernels is None else kernels.bmm(x, w)
    return made


def baddbmm(c: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """c [N, M, P] plus the product of x [N, M, K] and w [N, K, P]."""
    return torch.baddbmm(c, x, w) if _kernels(x.device) is None else c + bmm(x, w)


def matmul(x: Tensor, w: Tensor) -> Tensor:
    """x [.., M, K] times w [.., K, P], equal in front."""
    if _kernels(x.device) is None:
        return torch.matmul(x, w)
    flat = bmm(x.reshape(-1, *x.shape[-2:]), w.reshape(-1, *w.shape[-2:]))
    return flat.view(*x.shape[:-1], w.shape[-1])


def mean_square(x: Tensor) -> Tensor:
    """[.., 1] of fp32 x [.., D]."""
    if _kernels(x.device) is None:
        return x.square().mean(-1, keepdim=True)
    return linear(x.square(), x.new_ones(1, x.shape[-1])) / x.shape[-1]


def row_dot(x: Tensor, w: Tensor) -> Tensor:
    """[.., 1] of x [.., D] with w [D], fp32."""
    return (x * w).sum(-1, keepdim=True) if _kernels(x.device) is None else linear(x, w[None])


def _kernels(device: torch.device) -> ModuleType | None:
    from forebay.kernels import by_device  # which knows all operators, and they this file

    return by_device.products(device)


def sigmoid(x: Tensor) -> Tensor:
    return torch.reciprocal(torch.exp(-x) + 1.0)


def silu(x: Tensor) -> Tensor:
    return x / (torch.exp(-x) + 1.0)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x) without overflow, and without the cut-off to 0 that some libraries make below -16."""
    return x.clamp(min=0.0) + torch.log1p(torch.exp(-x.abs()))

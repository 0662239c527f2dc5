"""Exact mode's building blocks: a row's result never depends on the rows beside it, nor on where it stands.

Measured on x86 with MKL and oneDNN, fp32: a GEMM of 1, 2, 3 or 7 rows takes another path than a larger one and differs
in the last bits, one of a multiple of 8 rows never did; `torch.sigmoid`, `silu` and `softplus` run other code at the
end of a vector than in its body, while exp, log1p, tanh, sums and cumsum along a row do not. `probe.py` checks all of
it again on the machine at hand.
"""

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
    rows = F.linear(pad_rows(flat), w)[: flat.shape[0]]
    return rows if x.dim() == 2 else rows.reshape(*x.shape[:-1], w.shape[0])


def head_linear(x: Tensor, w: Tensor) -> Tensor:
    """x [T, H, in] times each head's w [H, in, out]: [T, H, out]."""
    return torch.bmm(pad_rows(x.transpose(0, 1)), w)[:, : x.shape[0]].transpose(0, 1)


def sigmoid(x: Tensor) -> Tensor:
    return torch.reciprocal(torch.exp(-x) + 1.0)


def silu(x: Tensor) -> Tensor:
    return x / (torch.exp(-x) + 1.0)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x) without overflow, and without the cut-off to 0 that some libraries make below -16."""
    return x.clamp(min=0.0) + torch.log1p(torch.exp(-x.abs()))

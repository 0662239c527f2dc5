"""Exact mode's matrix products on a CUDA device: a row's sums go over K in one order, whatever rows stand beside it.

cuBLAS chooses among kernels by the number of rows, and they add in different orders. Here tiles have one size, so a
row's bits depend on its own inputs alone.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, DEPTH, WARPS = 32, 64, 32, 4
BATCH_MAX = 65535  # programs along a grid's last dimension


@triton.jit(do_not_specialize=["M", "P", "K"])
def product_kernel(
    x, w, o, M, P, K, x_batch, x_row, x_column, w_batch, w_row, w_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """Program (tile of rows, tile of columns, batch): o [N, M, P] = x [N, M, K] w [N, K, P]."""
    n = tl.program_id(2).to(tl.int64)
    m = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    p = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, K, DEPTH):
        k = first + tl.arange(0, DEPTH)
        left = tl.load(
            x + n * x_batch + m[:, None] * x_row + k[None, :] * x_column,
            mask=(m < M)[:, None] & (k < K)[None, :], other=0.0,
        )  # fmt: skip
        right = tl.load(
            w + n * w_batch + k[:, None] * w_row + p[None, :] * w_column,
            mask=(k < K)[:, None] & (p < P)[None, :], other=0.0,
        )  # fmt: skip
        acc = tl.dot(left.to(LOW), right.to(LOW), acc, input_precision="ieee")
    at = o + n * M * P + m[:, None] * P + p[None, :]
    tl.store(at, acc.to(o.dtype.element_ty), mask=(m < M)[:, None] & (p < P)[None, :])


def bmm(x: Tensor, w: Tensor) -> Tensor:
    """x [N, M, K] times w [N, K, P]: [N, M, P], in x's dtype."""
    batch, rows, depth = x.shape
    columns = w.shape[2]
    assert w.shape[:2] == (batch, depth)
    o = torch.empty((batch, rows, columns), dtype=x.dtype, device=x.device)
    low = tl.bfloat16 if x.dtype == w.dtype == torch.bfloat16 else tl.float32
    for first in range(0, batch, BATCH_MAX):
        part = slice(first, first + BATCH_MAX)
        product_kernel[(triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS), len(x[part]))](
            x[part], w[part], o[part], rows, columns, depth, *x.stride(), *w.stride(),
            ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH, LOW=low, num_warps=WARPS,
        )  # fmt: skip
    return o

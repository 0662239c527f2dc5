"""KDA prefill, between the chunks and the scan: X = (I + A)^-1 of every chunk and head, and what it multiplies,
w = X (beta k e^G) and u = X beta v.

X comes by doubling, exact and as stable as substitution: with X the inverse of the diagonal blocks of size b and A_b
the blocks beside them, the inverse of the blocks of size 2 b is X - X A_b X. MID is the type of these products: fp16
for bf16 inputs, three bits finer, which holds because A's entries are at most 1.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

import triton
import triton.language as tl

from forebay.kernels.kda_chunks_triton import load_rows


@triton.jit
def _invert(strict, C: tl.constexpr, LEVELS: tl.constexpr, MID: tl.constexpr):
    """(I + A)^-1 of a strictly lower [C, C], C = 2^LEVELS."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    x = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -strict.to(tl.float32), 0.0))
    for n in tl.static_range(1, LEVELS):
        x_low = x.to(MID)
        y = tl.dot(x_low, strict, input_precision="ieee")
        beside = (i >> (n + 1) == j >> (n + 1)) & (i >> n > j >> n)
        x = tl.dot(tl.where(beside, -y, 0.0).to(MID), x_low, acc=x, input_precision="ieee")
    return x


@triton.jit
def solve_kernel(
    v, beta, strict, chunk_start, chunk_rows, w, u, v_stride, beta_stride, H,
    D: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, LOW: tl.constexpr, MID: tl.constexpr,
):  # fmt: skip
    """Program (head, chunk). v [T, H, D] with a row stride, beta logits [T, H], strict (A) [chunks, H, C, C]; w
    [chunks, H, C, D] comes in as beta k e^G; u likewise is written.
    """
    h = tl.program_id(0)
    c = tl.program_id(1)
    i = tl.arange(0, C)
    e = tl.arange(0, D)
    live = i < tl.load(chunk_rows + c)
    t = tl.load(chunk_start + c).to(tl.int64) + i
    tile = c.to(tl.int64) * H + h
    kind = w.dtype.element_ty
    a = tl.load(strict + tile * C * C + i[:, None] * C + i[None, :]).to(MID)
    at = tile * C * D + i[:, None] * D + e[None, :]
    kb = tl.load(w + at).to(LOW)
    b = tl.sigmoid(tl.load(beta + t * beta_stride + h, mask=live, other=0.0).to(tl.float32))
    vb = load_rows(v, (t * v_stride)[:, None], (h * D + e)[None, :], live[:, None]) * b[:, None]
    x = _invert(a, C, LEVELS, MID).to(LOW)
    tl.debug_barrier()  # every row has been read before one is replaced
    tl.store(w + at, tl.dot(x, kb, input_precision="ieee").to(kind))
    tl.store(u + at, tl.dot(x, vb.to(LOW), input_precision="ieee").to(kind))

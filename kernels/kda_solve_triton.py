"""KDA prefill, between the softplus gate's chunks and the scan: X = (I + A)^-1 of every chunk and head, and what it
multiplies, w = X (beta k e^G) and u = X beta v.

X comes by doubling, exact and as stable as substitution: with X the inverse of the diagonal blocks of size b and A_b
the blocks beside them, the inverse of the blocks of size 2 b is X - X A_b X. MID is the type of these products: fp16
for bf16 inputs, three bits finer, which holds because A's entries are at most 1.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

import triton
import triton.language as tl

from forebay.kernels.kda_chunks_triton import load_rows


@triton.jit
def invert(strict, apart, LEVELS: tl.constexpr, MID: tl.constexpr):
    """(I + A)^-1 of a strictly lower [C, C], C = 2^LEVELS; apart = i ^ j, whose highest bit tells the level of the
    doubling. What lies above the diagonal is zero in every product and needs no mask.
    """
    x = tl.where(apart == 0, 1.0, tl.where(apart == 1, -strict.to(tl.float32), 0.0))
    for n in tl.static_range(1, LEVELS):
        x_low = x.to(MID)
        y = tl.dot(x_low, strict, input_precision="ieee")
        x = tl.dot(tl.where(apart >> n == 1, -y, 0.0).to(MID), x_low, acc=x, input_precision="ieee")
    return x


@triton.jit
def solve_kernel(
    v, beta, strict, chunk_start, chunk_rows, made, v_stride, beta_stride, H,
    D: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, LOW: tl.constexpr, MID: tl.constexpr,
):  # fmt: skip
    """Program (head, chunk). v [T, H, D] with a row stride, beta logits [T, H], strict (A) [chunks, H, C, C]; of made
    [chunks, H, 4, C, D] w comes in as beta k e^G, and u is written.
    """
    h = tl.program_id(0)
    c = tl.program_id(1)
    i = tl.arange(0, C)
    j = tl.arange(0, C)[None, :]
    e = tl.arange(0, D)
    live = i < tl.load(chunk_rows + c)
    t = tl.load(chunk_start + c).to(tl.int64) + i
    tile = c.to(tl.int64) * H + h
    kind = made.dtype.element_ty
    a = tl.load(strict + tile * C * C + i[:, None] * C + j).to(MID)
    at = tile * (4 * C * D) + i[:, None] * D + e[None, :]
    kb = tl.load(made + at).to(LOW)
    b = tl.sigmoid(tl.load(beta + t * beta_stride + h, mask=live, other=0.0).to(tl.float32))
    vb = load_rows(v, (t * v_stride)[:, None], (h * D + e)[None, :], live[:, None]) * b[:, None]
    x = invert(a, i[:, None] ^ j, LEVELS, MID).to(LOW)
    tl.debug_barrier()  # every row has been read before one is replaced
    tl.store(made + at, tl.dot(x, kb, input_precision="ieee").to(kind))
    tl.store(made + (at + 2 * C * D), tl.dot(x, vb.to(LOW), input_precision="ieee").to(kind))

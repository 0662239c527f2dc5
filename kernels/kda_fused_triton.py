"""KDA prefill, for the bounded gate: in one kernel all that a chunk needs before the state arrives
(`kda_chunks_triton` states the algebra), the inverse and what it multiplies included.

The log decay of a token is at least -5, so over half a chunk of 32 tokens a factor stays within e^80, which fp32 and
bf16 hold. All of a chunk is referred to the running sum at its middle, r: e^(G_i - G_j) = e^(G_i - r) e^(r - G_j), one
product. Where a factor overflows the pair has j > i and is masked; where one underflows the whole pair is nothing that
counts, for the other factor is at most e^80.

All sums of log decays, from the chunk's start, from its middle and behind each token, are products of g with matrices
of 0, 1 and -1: summed in fp32 on the tensor cores, no scan over rows; columns of tokens that are not there are zero in
them. g is rounded to fp16 for all three, so that every factor sees the same decay: 2^-12 of each exponent, which is
less than the rounding to bf16 of a factor that has not decayed away. beta multiplies the inverse's columns, not what
stands behind it.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

import torch
import triton
import triton.language as tl

from forebay.kernels.kda_chunks_triton import LOG2E, inverse_norms, load_rows
from forebay.kernels.kda_solve_triton import invert


def sum_matrices(chunk: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[3, C, C]: rows that sum g from the start to themselves, from the middle to themselves (negative before it), and
    behind themselves.
    """
    i = torch.arange(chunk, device=device)[:, None]
    j = torch.arange(chunk, device=device)[None, :]
    start = (j <= i).to(dtype)
    return torch.stack((start, start - (j < chunk // 2).to(dtype), (j > i).to(dtype)))


@triton.jit
def _exp2(x, FAST: tl.constexpr):
    """2^x; FAST is one instruction, and 0 for what would be subnormal."""
    if FAST:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return tl.exp2(x)


@triton.jit
def _sigmoid2(x, FAST: tl.constexpr):
    """1 / (1 + 2^-x)."""
    if FAST:
        one = 1.0 + _exp2(-x, FAST)
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [one], tl.float32, is_pure=True, pack=1)
    return 1.0 / (1.0 + tl.exp2(-x))


@triton.jit
def fused_chunk_kernel(
    q, k, v, z, beta, A_log, dt_bias, sums, chunk_start, chunk_rows, made, pairs, decay,
    lower, q_stride, k_stride, v_stride, z_stride, beta_stride, H,
    D: tl.constexpr, DP: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    LOW: tl.constexpr, MID: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Program (head, chunk). Inputs [T, H, D] with a row stride each, beta logits [T, H]. Writes all four of made
    [chunks, H, 4, C, D], and pairs [chunks, H, C, C], zero in rows behind a short chunk's end, and decay [chunks, H, D]
    fp32. Channels are taken DP at a time.
    """
    h = tl.program_id(0)
    c = tl.program_id(1)
    r = tl.arange(0, C)
    i = r[:, None]
    j = tl.arange(0, C)[None, :]
    start = tl.load(chunk_start + c).to(tl.int64)
    live = r < tl.load(chunk_rows + c)
    some = live[:, None]
    there = tl.reshape(live, (1, C))
    tile = c.to(tl.int64) * H + h
    kind = made.dtype.element_ty
    square = i * C + j
    q += start * q_stride + h * D
    k += start * k_stride + h * D
    v += start * v_stride + h * D
    z += start * z_stride + h * D
    made += tile * (4 * C * D)
    decay += tile * D
    dt_bias += h * D

    b = tl.sigmoid(tl.load(beta + start * beta_stride + h + r * beta_stride, mask=live, other=0.0).to(tl.float32))
    rate = tl.exp(tl.load(A_log + h).to(tl.float32)) * LOG2E
    q_scale = (inverse_norms(q, i * q_stride, live, D) * (D**-0.5))[:, None]
    k_scale = inverse_norms(k, i * k_stride, live, D)[:, None]
    from_start = tl.load(sums + square, mask=there, other=0.0)
    from_middle = tl.load(sums + C * C + square, mask=there, other=0.0)
    to_end = tl.load(sums + 2 * C * C + square, mask=there, other=0.0)
    p = tl.zeros((C, C), tl.float32)
    a = tl.zeros((C, C), tl.float32)
    for part in tl.range(0, D, DP, num_stages=1):
        d = part + tl.arange(0, DP)[None, :]
        at = i * D + d
        raw = load_rows(z, i * z_stride, d, some)
        bias = tl.load(dt_bias + d).to(tl.float32) * rate
        g = (_sigmoid2(raw * rate + bias, FAST) * (lower * LOG2E)).to(MID)
        kx = load_rows(k, i * k_stride, d, some) * k_scale
        qx = load_rows(q, i * q_stride, d, some) * q_scale
        middle = tl.dot(from_middle, g, input_precision="ieee")
        grown = _exp2(middle, FAST)
        keys = tl.trans((kx * _exp2(-middle, FAST)).to(LOW))
        p = tl.dot((qx * grown).to(LOW), keys, acc=p, input_precision="ieee")
        a = tl.dot((kx * grown).to(LOW), keys, acc=a, input_precision="ieee")
        reach = _exp2(tl.dot(from_start, g, input_precision="ieee"), FAST)
        tl.store(made + (at + C * D), (qx * reach).to(kind))
        tl.store(made + at, (kx * reach).to(kind))  # in w's place until the inverse is there
        tl.store(decay + part + tl.arange(0, DP), tl.sum(tl.where(i == C - 1, reach, 0.0), 0))
        left = _exp2(tl.dot(to_end, g, input_precision="ieee"), FAST)
        tl.store(made + (at + 3 * C * D), (kx * left).to(kind))
    tl.store(pairs + tile * C * C + square, tl.where(j <= i, p, 0.0).to(kind))
    x = invert(tl.where(j < i, a * b[:, None], 0.0).to(MID), i ^ j, LEVELS, MID)
    x = (x * tl.reshape(b, (1, C))).to(LOW)
    tl.debug_barrier()  # all of k e^G is there
    for part in tl.range(0, D, DP, num_stages=1):
        d = part + tl.arange(0, DP)[None, :]
        at = i * D + d
        kg = tl.load(made + at).to(LOW)
        values = tl.load(v + (i * v_stride + d), mask=some, other=0.0).to(LOW)
        solved = tl.dot(x, kg, input_precision="ieee").to(kind)
        tl.debug_barrier()  # every row has been read before one is replaced
        tl.store(made + at, solved)
        tl.store(made + (at + 2 * C * D), tl.dot(x, values, input_precision="ieee").to(kind))

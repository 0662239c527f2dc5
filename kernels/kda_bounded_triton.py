"""KDA prefill, first kernel, for the bounded gate: what a chunk needs before the state arrives (`kda_chunks_triton` states
the algebra), with nearly all of it on the tensor cores.

The log decay of a token is at least -5, so over 16 tokens a factor stays within e^80, which fp32 and bf16 hold. Each half
of a chunk (32 tokens) is referred to the running sum at its middle, r: e^(G_i - G_j) = e^(G_i - r) e^(r - G_j). Where a
factor overflows the pair has j > i and is masked; where one underflows the whole pair is nothing that counts, for the
other factor is at most e^80.

Every exponent is a signed sum of g over some tokens: a product of g with a matrix of 0, 1 and -1, summed in fp32 without
a scan over rows. g is rounded to fp16 for it, once, so that every factor sees the same decay: 2^-12 of each exponent,
which is less than the rounding to bf16 of a factor that has not decayed away.
"""

import torch
import triton
import triton.language as tl

from forebay.kernels.kda_chunks_triton import inverse_norms, load_rows

HALF = 32
LOG2E = tl.constexpr(1.4426950408889634)


def sign_matrices(chunk: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[4, C, C]: what each row sums of g. From its half's middle to itself (negative before it); to its half's middle;
    from itself to the second half's middle; behind itself to the end.
    """
    i = torch.arange(chunk, device=device)[:, None]
    j = torch.arange(chunk, device=device)[None, :]
    to_row = (j <= i).to(dtype)
    to_middle = (j <= i // HALF * HALF + HALF // 2 - 1).to(dtype)
    to_last = (j <= chunk - HALF // 2 - 1).to(dtype).expand(chunk, chunk)
    return torch.stack((to_row - to_middle, to_middle, to_last - to_row, 1 - to_row))


@triton.jit
def _exp2(x, FAST: tl.constexpr):
    """2^x; FAST is one instruction, and 0 for what would be subnormal."""
    if FAST:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.exp2(x)


@triton.jit
def _sigmoid2(x, FAST: tl.constexpr):
    """1 / (1 + 2^-x)."""
    if FAST:
        one = 1.0 + _exp2(-x, FAST)
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [one], tl.float32, is_pure=True, pack=1)
    else:
        return 1.0 / (1.0 + tl.exp2(-x))


@triton.jit
def bounded_chunk_kernel(
    q, k, z, beta, A_log, dt_bias, signs, chunk_start, chunk_rows,
    w, q_decay, k_end, pairs, strict, decay,
    lower, q_stride, k_stride, z_stride, beta_stride, H,
    D: tl.constexpr, DP: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr,
    LOW: tl.constexpr, MID: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """What `chunk_kernel` does, for the bounded gate. Channels are taken DP at a time."""
    h = tl.program_id(0)
    c = tl.program_id(1)
    i = tl.arange(0, C)
    j = tl.arange(0, C)[None, :]
    start = tl.load(chunk_start + c).to(tl.int64)
    live = i < tl.load(chunk_rows + c)
    some = live[:, None]
    t = start + i
    tile = c.to(tl.int64) * H + h
    kind = w.dtype.element_ty

    b = tl.sigmoid(tl.load(beta + t * beta_stride + h, mask=live, other=0.0).to(tl.float32))
    rate = tl.exp(tl.load(A_log + h).to(tl.float32)) * LOG2E
    q_scale = inverse_norms(q, t * q_stride, h, live, D) * (D**-0.5)
    k_scale = inverse_norms(k, t * k_stride, h, live, D)
    to_i = j <= i[:, None]
    early = (i < HALF)[:, None]
    sign = signs + i[:, None] * C + j
    from_middle = tl.load(sign)
    to_middle = tl.load(sign + C * C)
    to_last = tl.load(sign + 2 * C * C)
    to_end = tl.load(sign + 3 * C * C)
    p = tl.zeros((C, C), tl.float32)
    a = tl.zeros((C, C), tl.float32)
    for part in tl.range(0, D, DP, num_stages=3):
        d = part + tl.arange(0, DP)
        col = (h * D + d)[None, :]
        at = tile * C * D + i[:, None] * D + d[None, :]
        raw = load_rows(z, (t * z_stride)[:, None], col, some)
        raw += tl.load(dt_bias + h * D + d).to(tl.float32)[None, :]
        g = tl.where(some, _sigmoid2(raw * rate, FAST) * (lower * LOG2E), 0.0).to(MID)
        tl.store(decay + tile * D + d, _exp2(tl.sum(g.to(tl.float32), 0), FAST))
        exponent = tl.dot(from_middle, g, input_precision="ieee")
        grown = _exp2(exponent, FAST)
        from_start = _exp2(tl.dot(to_middle, g, input_precision="ieee"), FAST)
        qg = load_rows(q, (t * q_stride)[:, None], col, some) * q_scale[:, None] * grown
        tl.store(q_decay + at, (qg * from_start).to(kind))
        q_low = qg.to(LOW)
        kx = load_rows(k, (t * k_stride)[:, None], col, some) * k_scale[:, None]
        kg = kx * grown
        tl.store(w + at, (kg * from_start * b[:, None]).to(kind))
        k_low = kg.to(LOW)
        tl.store(k_end + at, (kx * _exp2(tl.dot(to_end, g, input_precision="ieee"), FAST)).to(kind))
        to_own = tl.trans((kx * _exp2(-exponent, FAST)).to(LOW))
        to_late = tl.trans((kx * _exp2(tl.dot(to_last, g, input_precision="ieee"), FAST)).to(LOW))
        p = tl.dot(tl.where(early, q_low, 0.0), to_own, acc=p, input_precision="ieee")
        p = tl.dot(tl.where(early, 0.0, q_low), to_late, acc=p, input_precision="ieee")
        a = tl.dot(tl.where(early, k_low, 0.0), to_own, acc=a, input_precision="ieee")
        a = tl.dot(tl.where(early, 0.0, k_low), to_late, acc=a, input_precision="ieee")
    square = tile * C * C + i[:, None] * C + j
    tl.store(pairs + square, tl.where(to_i, p, 0.0).to(kind))
    tl.store(strict + square, tl.where(j < i[:, None], a * b[:, None], 0.0).to(strict.dtype.element_ty))

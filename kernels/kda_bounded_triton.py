"""KDA prefill, first kernels, for the bounded gate: what a chunk needs before the state arrives
(`kda_chunks_triton` states the algebra).

The log decay of a token is at least -5, so over QUARTER = 16 tokens a factor stays within e^80, which fp32 and bf16
hold. Each half of a chunk is referred to the running sum at its middle, r: e^(G_i - G_j) = e^(G_i - r) e^(r - G_j).
Where a factor overflows the pair has j > i and is masked; where one underflows the whole pair is nothing that counts,
for the other factor is at most e^80.

G_i - r is a product of g with a matrix of 0, 1 and -1: summed in fp32 on the tensor cores, without a scan over rows.
All other decays are that one times whole quarters' decays, which a small kernel makes first. g is rounded to fp16 for
both, so that every factor sees the same decay: 2^-12 of each exponent, which is less than the rounding to bf16 of a
factor that has not decayed away.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

import torch
import triton
import triton.language as tl

from forebay.kernels.kda_chunks_triton import inverse_norms, load_rows

HALF = 32
QUARTER = HALF // 2
LOG2E = tl.constexpr(1.4426950408889634)


def sign_matrix(chunk: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[C, C]: each row sums g from its half's middle to itself, negative where it lies before the middle."""
    i = torch.arange(chunk, device=device)[:, None]
    j = torch.arange(chunk, device=device)[None, :]
    return (j <= i).to(dtype) - (j <= i // HALF * HALF + QUARTER - 1).to(dtype)


@triton.jit
def exp2(x, FAST: tl.constexpr):
    """2^x; FAST is one instruction, and 0 for what would be subnormal."""
    if FAST:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return tl.exp2(x)


@triton.jit
def sigmoid2(x, FAST: tl.constexpr):
    """1 / (1 + 2^-x)."""
    if FAST:
        one = 1.0 + exp2(-x, FAST)
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [one], tl.float32, is_pure=True, pack=1)
    return 1.0 / (1.0 + tl.exp2(-x))


@triton.jit
def _gate(z, dt_bias, rate, lower, t, col, d, some, MID: tl.constexpr, FAST: tl.constexpr):
    """log2 decay of the rows t and channels d of a head, whose columns start at col."""
    raw = load_rows(z, t, col + d[None, :], some) + tl.load(dt_bias + col + d).to(tl.float32)[None, :]
    return tl.where(some, sigmoid2(raw * rate, FAST) * (lower * LOG2E), 0.0).to(MID)


@triton.jit
def quarter_kernel(
    z, A_log, dt_bias, chunk_start, chunk_rows, quarters, decay, lower, z_stride, H,
    D: tl.constexpr, C: tl.constexpr, QUARTER: tl.constexpr, MID: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Program (head, chunk): the decay over each quarter of a chunk, [chunks, H, C / QUARTER, D], and over all of it,
    [chunks, H, D], fp32.
    """
    N: tl.constexpr = C // QUARTER
    h = tl.program_id(0)
    c = tl.program_id(1)
    i = tl.arange(0, QUARTER)
    d = tl.arange(0, D)
    start = tl.load(chunk_start + c).to(tl.int64)
    rows = tl.load(chunk_rows + c)
    tile = c.to(tl.int64) * H + h
    rate = tl.exp(tl.load(A_log + h).to(tl.float32)) * LOG2E
    whole = tl.zeros((D,), tl.float32)
    for r in tl.static_range(N):
        row = r * QUARTER + i
        t = (start + row) * z_stride
        g = _gate(z, dt_bias, rate, lower, t[:, None], h * D, d, (row < rows)[:, None], MID, FAST).to(tl.float32)
        total = tl.sum(g, 0)
        tl.store(quarters + (tile * N + r) * D + d, exp2(total, FAST))
        whole += total
    tl.store(decay + tile * D + d, exp2(whole, FAST))


@triton.jit
def bounded_chunk_kernel(
    q, k, z, beta, A_log, dt_bias, signs, quarters, chunk_start, chunk_rows,
    w, q_decay, k_end, pairs, strict,
    lower, q_stride, k_stride, z_stride, beta_stride, H,
    D: tl.constexpr, DP: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr,
    LOW: tl.constexpr, MID: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """What `chunk_kernel` does, for the bounded gate and but for the decay. Channels are taken DP at a time."""
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
    early = (i < HALF)[:, None]
    from_middle = tl.load(signs + i[:, None] * C + j)
    p = tl.zeros((C, C), tl.float32)
    a = tl.zeros((C, C), tl.float32)
    for part in tl.range(0, D, DP, num_stages=3):
        d = part + tl.arange(0, DP)
        col = (h * D + d)[None, :]
        at = tile * C * D + i[:, None] * D + d[None, :]
        quarter = quarters + tile * (C // HALF * 2 * D) + d
        first = tl.load(quarter)[None, :]
        second = tl.load(quarter + D)[None, :]
        third = tl.load(quarter + 2 * D)[None, :]
        g = _gate(z, dt_bias, rate, lower, (t * z_stride)[:, None], h * D, d, some, MID, FAST)
        exponent = tl.dot(from_middle, g, input_precision="ieee")
        grown = exp2(exponent, FAST)
        from_start = tl.where(early, first, first * second * third)
        qg = load_rows(q, (t * q_stride)[:, None], col, some) * q_scale[:, None] * grown
        kx = load_rows(k, (t * k_stride)[:, None], col, some) * k_scale[:, None]
        kg = kx * grown
        tl.store(q_decay + at, (qg * from_start).to(kind))
        tl.store(w + at, (kg * from_start * b[:, None]).to(kind))
        q_low = qg.to(LOW)
        k_low = kg.to(LOW)
        own = kx * exp2(-exponent, FAST)  # keys referred to their own half's middle
        late = tl.where(early, own * second * third, own)  # and all to the second half's
        tl.store(k_end + at, (late * tl.load(quarter + 3 * D)[None, :]).to(kind))
        to_own = tl.trans(own.to(LOW))
        to_late = tl.trans(late.to(LOW))
        p_own = tl.dot(q_low, to_own, acc=p, input_precision="ieee")
        p = tl.where(early, p_own, tl.dot(q_low, to_late, acc=p, input_precision="ieee"))
        a_own = tl.dot(k_low, to_own, acc=a, input_precision="ieee")
        a = tl.where(early, a_own, tl.dot(k_low, to_late, acc=a, input_precision="ieee"))
    square = tile * C * C + i[:, None] * C + j
    tl.store(pairs + square, tl.where(j <= i[:, None], p, 0.0).to(kind))
    tl.store(strict + square, tl.where(j < i[:, None], a * b[:, None], 0.0).to(strict.dtype.element_ty))

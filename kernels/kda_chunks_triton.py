"""KDA prefill, first kernel: all of a chunk that does not need the state, all chunks and heads in parallel.

With G the running sum of the log decay inside a chunk, k and q L2-normalised and q scaled:
    P_ij = q_i . (k_j e^(G_i - G_j)), j <= i;   A_ij = beta_i k_i . (k_j e^(G_i - G_j)), j < i;   X = (I + A)^-1
    w = X beta (k e^G);   u = X beta v;   q_decay = q e^G;   k_end = k e^(G_last - G)
so that with the state S before the chunk: U = u - w S;  o = q_decay S + P U;  S <- e^(G_last) S + k_end^T U.
w, q_decay, u and k_end, [C, D] each, lie one behind the other in `made`; both kernels in front of the scan and the
scan itself know that order. X, w and u are `kda_solve_triton`'s; this kernel leaves beta k e^G in w's place.

This is the softplus gate's form (`kda_fused_triton` has the other's). Decays split at the start of the later
token's block of BLOCK tokens, r: e^(G_i - r) e^(r - G_j), both at most 1 for j in an earlier block. Inside a block
the decay has no bound that a split could live with, so there the pairs are formed one by one.

All logarithms are to the base 2. LOW is the type of the large products, fp32 where the inputs are (Triton's interpreter
has no sound bf16).
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

import triton
import triton.language as tl

BLOCK = 16
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def softplus(x):
    e = tl.exp(-tl.abs(x))
    return tl.maximum(x, 0.0) + tl.where(e < 0.001, e - 0.5 * e * e, tl.log(1.0 + e))


@triton.jit
def log2_decay(raw, rate, lower, BOUNDED: tl.constexpr):
    """raw = z + dt_bias, rate = exp(A_log)."""
    if BOUNDED:
        return tl.sigmoid(rate * raw) * (lower * LOG2E)
    return softplus(raw) * rate * -LOG2E


@triton.jit
def _spread(blocks, C: tl.constexpr, B: tl.constexpr):
    """[C/B, B, B] as the diagonal blocks of [C, C], zero elsewhere."""
    wide = tl.reshape(tl.broadcast_to(tl.expand_dims(blocks, 2), (C // B, B, C // B, B)), (C, C))
    i = tl.arange(0, C)
    return tl.where((i // B)[:, None] == (i // B)[None, :], wide, 0.0)


@triton.jit
def _pairs_in_blocks(q, k, total, p, a):
    """Add q_i . k_j e^(G_i - G_j) to p and k_i . k_j e^(G_i - G_j) to a [C/B, B, B], pair by pair; total = G from the
    block's start, all [C/B, B, D].
    """
    B: tl.constexpr = q.shape[1]
    r = tl.arange(0, B)
    for j in range(B):
        row = (r == j)[None, :, None]
        t_j = tl.sum(tl.where(row, total, 0.0), 1)[:, None, :]
        k_j = tl.sum(tl.where(row, k, 0.0), 1)[:, None, :]
        decayed = tl.exp2(tl.minimum(total - t_j, 0.0)) * k_j
        column = (r == j)[None, None, :]
        p += tl.where(column, tl.sum(decayed * q, 2)[:, :, None], 0.0)
        a += tl.where(column, tl.sum(decayed * k, 2)[:, :, None], 0.0)
    return p, a


@triton.jit
def load_rows(x, t, col, some):
    return tl.load(x + (t + col), mask=some, other=0.0).to(tl.float32)


@triton.jit
def inverse_norms(x, t, live, D: tl.constexpr):
    """1 / |x_i| of rows [C, D] that start t [C, 1] elements behind x."""
    rows = load_rows(x, t, tl.arange(0, D)[None, :], live[:, None])
    return tl.rsqrt(tl.sum(rows * rows, 1) + 1e-6)


@triton.jit
def chunk_kernel(
    q, k, z, beta, A_log, dt_bias, chunk_start, chunk_rows,
    made, pairs, strict, decay,
    q_stride, k_stride, z_stride, beta_stride, H,
    D: tl.constexpr, DP: tl.constexpr, C: tl.constexpr, B: tl.constexpr, LOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (head, chunk), for the softplus gate. Inputs [T, H, D] with a row stride each, beta logits [T, H].
    Channels are taken DP at a time, so that what is live fits in registers.

    Writes of made [chunks, H, 4, C, D] beta k e^G in w's place, q_decay and k_end; pairs (P) and strict (A) [chunks, H,
    C, C] in their types, zero in rows behind a short chunk's end; and decay = e^(G_last) [chunks, H, D] fp32.
    """
    N: tl.constexpr = C // B
    h = tl.program_id(0)
    c = tl.program_id(1)
    i = tl.arange(0, C)
    block = i // B
    r = tl.arange(0, N)[:, None]
    start = tl.load(chunk_start + c).to(tl.int64)
    live = i < tl.load(chunk_rows + c)
    some = live[:, None]
    tile = c.to(tl.int64) * H + h
    kind = made.dtype.element_ty
    q += start * q_stride + h * D
    k += start * k_stride + h * D
    z += start * z_stride + h * D
    made += tile * (4 * C * D)

    b = tl.sigmoid(tl.load(beta + (start + i) * beta_stride + h, mask=live, other=0.0).to(tl.float32))
    rate = tl.exp(tl.load(A_log + h).to(tl.float32))
    q_scale = inverse_norms(q, i[:, None] * q_stride, live, D) * (D**-0.5)
    k_scale = inverse_norms(k, i[:, None] * k_stride, live, D)
    p = tl.zeros((C, C), tl.float32)
    a = tl.zeros((C, C), tl.float32)
    p_own = tl.zeros((N, B, B), tl.float32)
    a_own = tl.zeros((N, B, B), tl.float32)
    for part in tl.range(0, D, DP, num_stages=1):
        d = part + tl.arange(0, DP)
        col = d[None, :]
        raw = load_rows(z, i[:, None] * z_stride, col, some)
        raw += tl.load(dt_bias + h * D + d).to(tl.float32)[None, :]
        g = tl.where(some, softplus(raw) * rate * -LOG2E, 0.0)
        total = tl.cumsum(tl.reshape(g, (N, B, DP)), 1)  # from the start of each block
        sums = tl.sum(tl.reshape(g, (N, B, DP)), 1)
        before = tl.cumsum(sums, 0) - sums  # G at the start of each block
        last = tl.sum(sums, 0)[None, :]
        from_start = tl.exp2(before)[:, None, :]
        kx = tl.reshape(load_rows(k, i[:, None] * k_stride, col, some) * k_scale[:, None], (N, B, DP))
        qx = tl.reshape(load_rows(q, i[:, None] * q_stride, col, some) * q_scale[:, None], (N, B, DP))
        p_own, a_own = _pairs_in_blocks(qx, kx, total, p_own, a_own)
        grown = tl.exp2(total)
        qg = qx * grown
        kg = kx * grown
        own = kx * tl.exp2(sums[:, None, :] - total)  # keys decayed to the end of their own block
        anchor = before + sums
        at = i[:, None] * D + d[None, :]
        tl.store(made + (at + C * D), tl.reshape(qg * from_start, (C, DP)).to(kind))
        tl.store(made + (at + 3 * C * D), tl.reshape(own * tl.exp2(last - anchor)[:, None, :], (C, DP)).to(kind))
        tl.store(decay + tile * D + d[None, :], tl.exp2(last))
        tl.store(made + at, (tl.reshape(kg * from_start, (C, DP)) * b[:, None]).to(kind))
        q_low = tl.reshape(qg, (C, DP)).to(LOW)
        k_low = tl.reshape(kg, (C, DP)).to(LOW)
        for s in tl.range(1, N, num_stages=1):  # kept a loop: unrolled, it spills
            here = tl.sum(tl.where(r == s, before, 0.0), 0)[None, :]
            reach = tl.where(r < s, tl.exp2(tl.minimum(here - anchor, 0.0)), 0.0)
            keys = tl.trans(tl.reshape(own * reach[:, None, :], (C, DP)).to(LOW))
            mine = (block == s)[:, None]
            p += tl.where(mine, tl.dot(q_low, keys, input_precision=PRECISION), 0.0)
            a += tl.where(mine, tl.dot(k_low, keys, input_precision=PRECISION), 0.0)
    p += _spread(p_own, C, B)
    a += _spread(a_own, C, B)
    square = tile * C * C + i[:, None] * C + i[None, :]
    tl.store(pairs + square, tl.where(i[:, None] >= i[None, :], p, 0.0).to(kind))
    below = tl.where(i[:, None] > i[None, :], a * b[:, None], 0.0)
    tl.store(strict + square, below.to(strict.dtype.element_ty))

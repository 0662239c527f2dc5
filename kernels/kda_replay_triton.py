"""KDA replay: accepted draft tokens folded into the states in pages, and a window of tokens run on from there, in one
launch.

The parts of a token are `kda_steps_triton`'s, so that replay leaves what as many steps would.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

import triton
import triton.language as tl

from forebay.kernels.kda_chunks_triton import log2_decay
from forebay.kernels.kda_steps_triton import columns, conv, keys_values, put, recur, store_tail, token_row, unit


@triton.jit
def _behind(x, tail, first, count, back: tl.constexpr, x_row, row):
    """The input `back` tokens before row first + count of x; what lies before row `first` is in the tail."""
    inside = count >= back
    return tl.load(tl.where(inside, x + (first + count - back) * x_row, tail + (3 + count - back) * row)).to(tl.float32)


@triton.jit
def _prepare(
    x, z, tail, taps, prepared, bias, rate, lower, first, count, x_row, z_row, h, width,
    D: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Of rows first .. first + count the normalised key, the value and the decay, [count, 3, D] fp32: what does not
    wait for the state.
    """
    d = tl.arange(0, D)
    col = h * D + d
    row = 3 * width
    for t in range(count):
        for part in tl.static_range(1, 3):
            given, before = x + part * width + col, tail + part * width + col
            a = _behind(given, before, first, t, 3, x_row, row)
            b = _behind(given, before, first, t, 2, x_row, row)
            c = _behind(given, before, first, t, 1, x_row, row)
            y = conv(a, b, c, tl.load(given + (first + t) * x_row).to(tl.float32), taps + part * width + col, row)
            if part == 1:
                y = unit(y)
            tl.store(prepared + (t * 3 + part - 1) * D + d, y)
        raw = tl.load(z + (first + t) * z_row + col).to(tl.float32)
        tl.store(prepared + (t * 3 + 2) * D + d, tl.exp2(log2_decay(raw + bias, rate, lower, BOUNDED)))


@triton.jit
def _fold(beta, corner, prepared, first, count, beta_row, h, e, D: tl.constexpr):
    """Rows first .. first + count into the value columns e of the state, which stays in registers meanwhile."""
    d = tl.arange(0, D)
    at = columns(corner, e, D)
    S = tl.load(at)
    for t in range(count):
        k = tl.load(prepared + t * 3 * D + d)
        v = tl.load(prepared + (t * 3 + 1) * D + e)
        alpha = tl.load(prepared + (t * 3 + 2) * D + d)
        strength = tl.sigmoid(tl.load(beta + (first + t) * beta_row + h).to(tl.float32))
        S, _ = recur(S, k, k, 0.0, v, alpha, strength)
    if count > 0:
        tl.store(at, S)


@triton.jit
def replay_parts_kernel(
    x, z, beta, gate, taps, A_log, dt_bias, norm_weight, states, tails, page, accepted, prepared, o,
    lower, eps, x_row, z_row, beta_row, gate_row, o_row, page_states, page_tails, H,
    D: tl.constexpr, DRAFT: tl.constexpr, WINDOW: tl.constexpr, PARTS: tl.constexpr,
    BOUNDED: tl.constexpr,
):  # fmt: skip
    """`replay_kernel` with the accepted tokens folded into one part of the state's columns after the other, as the
    steps' kernels have them. Keys, values and decays are made first, into prepared [B, H, DRAFT, 3, D] fp32, so that
    only the recurrence itself is a chain, and few registers are held along it.
    """
    h = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, D)
    e = tl.arange(0, D // PARTS)
    width = H * D
    row = 3 * width
    col = h * D + d
    at = tl.load(page + n).to(tl.int64)
    count = tl.load(accepted + n)
    first = n * (DRAFT + WINDOW)
    bias = tl.load(dt_bias + col).to(tl.float32)
    rate = tl.exp(tl.load(A_log + h).to(tl.float32))
    corner = states + at * page_states + h * D * D
    tail = tails + at * page_tails
    prepared += (n * H + h) * (DRAFT * 3 * D)
    _prepare(x, z, tail, taps, prepared, bias, rate, lower, first, count, x_row, z_row, h, width, D, BOUNDED)
    tl.debug_barrier()  # keys, values and decays are there
    for part in tl.static_range(PARTS):
        _fold(beta, corner, prepared, first, count, beta_row, h, e + part * (D // PARTS), D)
    tail += col
    aq = _behind(x + col, tail, first, count, 3, x_row, row)
    ak = _behind(x + col + width, tail + width, first, count, 3, x_row, row)
    av = _behind(x + col + 2 * width, tail + 2 * width, first, count, 3, x_row, row)
    bq = _behind(x + col, tail, first, count, 2, x_row, row)
    bk = _behind(x + col + width, tail + width, first, count, 2, x_row, row)
    bv = _behind(x + col + 2 * width, tail + 2 * width, first, count, 2, x_row, row)
    cq = _behind(x + col, tail, first, count, 1, x_row, row)
    ck = _behind(x + col + width, tail + width, first, count, 1, x_row, row)
    cv = _behind(x + col + 2 * width, tail + 2 * width, first, count, 1, x_row, row)
    tl.debug_barrier()  # all have read the tail, and all parts of the state are there
    if count > 0:
        store_tail(tail, aq, ak, av, bq, bk, bv, cq, ck, cv, width)
    if WINDOW > 0:
        S = tl.load(columns(corner, d, D))
        for t in range(WINDOW):
            r = first + DRAFT + t
            xq, xk, xv, raw, b = token_row(x, z, beta, r, x_row, z_row, beta_row, col, h, width)
            q = unit(conv(aq, bq, cq, xq, taps + col, row)) * (D**-0.5)
            k = unit(conv(ak, bk, ck, xk, taps + col + width, row))
            v = conv(av, bv, cv, xv, taps + col + 2 * width, row)
            alpha = tl.exp2(log2_decay(raw + bias, rate, lower, BOUNDED))
            S, out = recur(S, q, k, tl.sum(q * k, 0), v, alpha, tl.sigmoid(b))
            aq, ak, av = bq, bk, bv
            bq, bk, bv = cq, ck, cv
            cq, ck, cv = xq, xk, xv
            scale = tl.rsqrt(tl.sum(out * out, 0) / D + eps)
            put(o + (n * WINDOW + t) * o_row + h * D, gate + r * gate_row + h * D, norm_weight, d, out, scale, True)


@triton.jit
def replay_kernel(
    x, z, beta, gate, taps, A_log, dt_bias, norm_weight, states, tails, page, accepted, o,
    lower, eps, x_row, z_row, beta_row, gate_row, o_row, page_states, page_tails, H,
    D: tl.constexpr, DRAFT: tl.constexpr, WINDOW: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Program (head, sequence). Rows n * (DRAFT + WINDOW) + t of x, z, beta and gate: first the DRAFT drafted tokens,
    of which the first accepted[n] are folded into the state in the page (tail too), then WINDOW tokens that run on
    from it and leave no trace but their outputs, o [B, WINDOW, H, D] by rows.
    """
    h = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, D)
    e = tl.arange(0, D)
    width = H * D
    row = 3 * width
    col = h * D + d
    at = tl.load(page + n).to(tl.int64)
    count = tl.load(accepted + n)
    S = tl.load(states + at * page_states + h * D * D + d[:, None] * D + e[None, :])
    bias = tl.load(dt_bias + col).to(tl.float32)
    rate = tl.exp(tl.load(A_log + h).to(tl.float32))
    tail = tails + at * page_tails + col
    ak, av = keys_values(tail, width)
    bk, bv = keys_values(tail + row, width)
    ck, cv = keys_values(tail + 2 * row, width)
    first = n * (DRAFT + WINDOW)
    for t in range(count):
        _, xk, xv, raw, b = token_row(x, z, beta, first + t, x_row, z_row, beta_row, col, h, width)
        k = unit(conv(ak, bk, ck, xk, taps + col + width, row))
        v = conv(av, bv, cv, xv, taps + col + 2 * width, row)
        alpha = tl.exp2(log2_decay(raw + bias, rate, lower, BOUNDED))
        S, _ = recur(S, k, k, 0.0, v, alpha, tl.sigmoid(b))
        ak, av = bk, bv
        bk, bv = ck, cv
        ck, cv = xk, xv
    aq = _behind(x + col, tail, first, count, 3, x_row, row)
    bq = _behind(x + col, tail, first, count, 2, x_row, row)
    cq = _behind(x + col, tail, first, count, 1, x_row, row)
    tl.debug_barrier()  # all have read the tail
    if count > 0:
        tl.store(states + at * page_states + h * D * D + d[:, None] * D + e[None, :], S)
        store_tail(tail, aq, ak, av, bq, bk, bv, cq, ck, cv, width)
    for t in range(WINDOW):
        r = first + DRAFT + t
        xq, xk, xv, raw, b = token_row(x, z, beta, r, x_row, z_row, beta_row, col, h, width)
        q = unit(conv(aq, bq, cq, xq, taps + col, row)) * (D**-0.5)
        k = unit(conv(ak, bk, ck, xk, taps + col + width, row))
        v = conv(av, bv, cv, xv, taps + col + 2 * width, row)
        alpha = tl.exp2(log2_decay(raw + bias, rate, lower, BOUNDED))
        S, out = recur(S, q, k, tl.sum(q * k, 0), v, alpha, tl.sigmoid(b))
        aq, ak, av = bq, bk, bv
        bq, bk, bv = cq, ck, cv
        cq, ck, cv = xq, xk, xv
        scale = tl.rsqrt(tl.sum(out * out, 0) / D + eps)
        put(o + (n * WINDOW + t) * o_row + h * D, gate + r * gate_row + h * D, norm_weight, d, out, scale, True)

"""KDA decode: one fused step over a batch of states in pages, and replay of accepted draft tokens.

One program a (head, sequence): the head's state [D, D] is read once into registers and written once, fp32; everything
else of a token (convolution tails and taps, gate, norm weight) is a few vectors. S^T k and S^T q of the decayed state
are summed together, so that o = S^T q + u (k . q) needs no second pass over the updated state.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

import triton
import triton.language as tl

from forebay.kernels.kda_chunks_triton import log2_decay

CONV_WIDTH = 4


@triton.jit
def _vectors(at, width):
    """q, k and v of a row whose three parts lie `width` elements apart."""
    return (
        tl.load(at).to(tl.float32),
        tl.load(at + width).to(tl.float32),
        tl.load(at + 2 * width).to(tl.float32),
    )


@triton.jit
def _keys_values(at, width):
    """k and v of such a row."""
    return tl.load(at + width).to(tl.float32), tl.load(at + 2 * width).to(tl.float32)


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def _row(x, z, beta, r, x_row, z_row, beta_row, col, h, width):
    """q, k, v before the convolution, raw gate and beta logit of row r."""
    q, k, v = _vectors(x + r * x_row + col, width)
    raw = tl.load(z + r * z_row + col).to(tl.float32)
    return q, k, v, raw, tl.load(beta + r * beta_row + h).to(tl.float32)


@triton.jit
def _conv(a, b, c, x, taps, row):
    """Four taps [4, channels] over three earlier inputs and x, then SiLU."""
    y = a * tl.load(taps).to(tl.float32) + b * tl.load(taps + row).to(tl.float32)
    y += c * tl.load(taps + 2 * row).to(tl.float32) + x * tl.load(taps + 3 * row).to(tl.float32)
    return _silu(y)


@triton.jit
def _recur(S, q, k, qk, v, alpha, b):
    """One token on S [K, V]: (S, o), with q and k normalised and qk their product."""
    S = S * alpha[:, None]
    read = tl.sum(S * k[:, None], 0)
    out = tl.sum(S * q[:, None], 0)
    u = b * (v - read)
    return S + k[:, None] * u[None, :], out + u * qk


@triton.jit
def _conv_from(tail, x, taps, row):
    """Convolve channels whose earlier inputs lie in three rows of the tail."""
    one = tl.load(tail).to(tl.float32)
    two = tl.load(tail + row).to(tl.float32)
    return _conv(one, two, tl.load(tail + 2 * row).to(tl.float32), x, taps, row)


@triton.jit
def _shift(tail, x, row):
    """Three rows of a tail move up by one and x comes behind them, once all have been read."""
    two = tl.load(tail + row)
    three = tl.load(tail + 2 * row)
    fresh = tl.load(x)
    tl.debug_barrier()  # small vectors are held by several threads each
    tl.store(tail, two)
    tl.store(tail + row, three)
    tl.store(tail + 2 * row, fresh.to(tail.dtype.element_ty))


@triton.jit
def _store_tail(tail, aq, ak, av, bq, bk, bv, cq, ck, cv, width):
    """Three inputs, oldest first."""
    kind = tail.dtype.element_ty
    row = 3 * width
    tl.store(tail, aq.to(kind))
    tl.store(tail + width, ak.to(kind))
    tl.store(tail + 2 * width, av.to(kind))
    tl.store(tail + row, bq.to(kind))
    tl.store(tail + row + width, bk.to(kind))
    tl.store(tail + row + 2 * width, bv.to(kind))
    tl.store(tail + 2 * row, cq.to(kind))
    tl.store(tail + 2 * row + width, ck.to(kind))
    tl.store(tail + 2 * row + 2 * width, cv.to(kind))


@triton.jit
def _shift_all(tail, x, row, width):
    """`_shift` of q, k and v, whose channels lie `width` apart, behind one barrier."""
    q_two, q_three, q_fresh = tl.load(tail + row), tl.load(tail + 2 * row), tl.load(x)
    k_two, k_three, k_fresh = tl.load(tail + row + width), tl.load(tail + 2 * row + width), tl.load(x + width)
    values = tail + 2 * width
    v_two, v_three, v_fresh = tl.load(values + row), tl.load(values + 2 * row), tl.load(x + 2 * width)
    tl.debug_barrier()  # all have read the tail
    _store_tail(tail, q_two, k_two, v_two, q_three, k_three, v_three, q_fresh, k_fresh, v_fresh, width)


@triton.jit
def _columns(corner, e, D: tl.constexpr):
    """Where the value columns e of a state lie."""
    return corner + tl.arange(0, D)[:, None] * D + e[None, :]


@triton.jit
def _step_columns(S, corner, v, q, k, qk, alpha, b, e, D: tl.constexpr):
    """The value columns e, S as loaded: o before its norm; the state is written back."""
    at = _columns(corner, e, D)
    S, out = _recur(S, q, k, qk, v, alpha, b)
    tl.store(at, S)
    return out


@triton.jit
def _values(x, tail, taps, e, row, CONV: tl.constexpr):
    v = tl.load(x + e).to(tl.float32)
    if CONV:
        v = _conv_from(tail + e, v, taps + e, row)
    return v


@triton.jit
def _put(o, gate, weight, e, out, scale, NORM: tl.constexpr):
    """Store o, after norm and output gate where asked."""
    if NORM:
        opened = tl.sigmoid(tl.load(gate + e).to(tl.float32))
        out = out * scale * tl.load(weight + e).to(tl.float32) * opened
    tl.store(o + e, out.to(o.dtype.element_ty))


@triton.jit
def step_kernel(
    x, z, beta, gate, taps, A_log, dt_bias, norm_weight, states, tails, page, o,
    lower, eps, x_stride, z_stride, beta_stride, gate_stride, o_stride, page_states, page_tails, H,
    D: tl.constexpr, HALVES: tl.constexpr, EARLY: tl.constexpr, BOUNDED: tl.constexpr, CONV: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Program (head, sequence). x [B, 3 H D] is q|k|v before the convolution (after SiLU without CONV), z the raw gate,
    beta logits, gate the output gate's logits. `page_*`: elements from page to page of the states and of the tails.
    HALVES: the state passes through registers in two halves of its columns. EARLY: the first half (or all) is asked for
    before anything is computed, so that it is on its way during the convolutions, and the tail moves up in one go.
    """
    h = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, D)
    width = H * D
    row = 3 * width
    col = h * D + d
    at = tl.load(page + n).to(tl.int64)
    corner = states + at * page_states + h * D * D
    tail = tails + at * page_tails
    e = tl.arange(0, D // 2) if HALVES else d
    if EARLY:
        S = tl.load(_columns(corner, e, D))
    q = tl.load(x + n * x_stride + col).to(tl.float32)
    k = tl.load(x + n * x_stride + width + col).to(tl.float32)
    raw = tl.load(z + n * z_stride + col).to(tl.float32) + tl.load(dt_bias + col).to(tl.float32)
    b = tl.sigmoid(tl.load(beta + n * beta_stride + h).to(tl.float32))
    alpha = tl.exp2(log2_decay(raw, tl.exp(tl.load(A_log + h).to(tl.float32)), lower, BOUNDED))
    if CONV:
        q = _conv_from(tail + col, q, taps + col, row)
        k = _conv_from(tail + width + col, k, taps + width + col, row)
    q = _unit(q) * (D**-0.5)
    k = _unit(k)
    qk = tl.sum(q * k, 0)
    values = 2 * width + h * D
    x_v = x + n * x_stride + values
    to = o + n * o_stride + h * D
    opening = gate + n * gate_stride + h * D
    v = _values(x_v, tail + values, taps + values, e, row, CONV)
    if HALVES:
        f = e + D // 2
        v_f = _values(x_v, tail + values, taps + values, f, row, CONV)
        if CONV and EARLY:
            _shift_all(tail + col, x + n * x_stride + col, row, width)
        if not EARLY:
            S = tl.load(_columns(corner, e, D))
        first = _step_columns(S, corner, v, q, k, qk, alpha, b, e, D)
        second = _step_columns(tl.load(_columns(corner, f, D)), corner, v_f, q, k, qk, alpha, b, f, D)
        scale = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / D + eps)
        _put(to, opening, norm_weight, e, first, scale, NORM)
        _put(to, opening, norm_weight, f, second, scale, NORM)
    else:
        if CONV and EARLY:
            _shift_all(tail + col, x + n * x_stride + col, row, width)
        if not EARLY:
            S = tl.load(_columns(corner, e, D))
        out = _step_columns(S, corner, v, q, k, qk, alpha, b, d, D)
        _put(to, opening, norm_weight, d, out, tl.rsqrt(tl.sum(out * out, 0) / D + eps), NORM)
    if CONV and not EARLY:
        for part in tl.static_range(3):
            _shift(tail + part * width + col, x + n * x_stride + part * width + col, row)


@triton.jit
def _behind(x, tail, first, count, back: tl.constexpr, x_row, row):
    """The input `back` tokens before row first + count of x; what lies before row `first` is in the tail."""
    inside = count >= back
    return tl.load(tl.where(inside, x + (first + count - back) * x_row, tail + (3 + count - back) * row)).to(tl.float32)


@triton.jit
def _prepare(
    x, z, tail, taps, keys_decays, bias, rate, lower, first, count, x_row, z_row, h, width,
    D: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Of rows first .. first + count the normalised key and the decay, [count, 2, D] fp32: what does not wait for the
    state.
    """
    d = tl.arange(0, D)
    col = h * D + d
    row = 3 * width
    from_keys, from_tail = x + width + col, tail + width + col
    for t in range(count):
        a = _behind(from_keys, from_tail, first, t, 3, x_row, row)
        b = _behind(from_keys, from_tail, first, t, 2, x_row, row)
        c = _behind(from_keys, from_tail, first, t, 1, x_row, row)
        fresh = tl.load(from_keys + (first + t) * x_row).to(tl.float32)
        raw = tl.load(z + (first + t) * z_row + col).to(tl.float32)
        tl.store(keys_decays + t * (2 * D) + d, _unit(_conv(a, b, c, fresh, taps + width + col, row)))
        tl.store(keys_decays + t * (2 * D) + D + d, tl.exp2(log2_decay(raw + bias, rate, lower, BOUNDED)))


@triton.jit
def _fold(
    x, beta, tail, taps, corner, keys_decays, first, count, x_row, beta_row, h, width, e, D: tl.constexpr
):  # fmt: skip
    """Rows first .. first + count into the value columns e of the state, which stays in registers meanwhile."""
    d = tl.arange(0, D)
    row = 3 * width
    values = 2 * width + h * D + e
    at = _columns(corner, e, D)
    S = tl.load(at)
    a = tl.load(tail + values).to(tl.float32)
    b = tl.load(tail + row + values).to(tl.float32)
    c = tl.load(tail + 2 * row + values).to(tl.float32)
    for t in range(count):
        k = tl.load(keys_decays + t * (2 * D) + d)
        alpha = tl.load(keys_decays + t * (2 * D) + D + d)
        fresh = tl.load(x + (first + t) * x_row + values).to(tl.float32)
        v = _conv(a, b, c, fresh, taps + values, row)
        strength = tl.sigmoid(tl.load(beta + (first + t) * beta_row + h).to(tl.float32))
        S, _ = _recur(S, k, k, 0.0, v, alpha, strength)
        a, b, c = b, c, fresh
    if count > 0:
        tl.store(at, S)


@triton.jit
def replay_halves_kernel(
    x, z, beta, gate, taps, A_log, dt_bias, norm_weight, states, tails, page, accepted, keys_decays, o,
    lower, eps, x_row, z_row, beta_row, gate_row, o_row, page_states, page_tails, H,
    D: tl.constexpr, DRAFT: tl.constexpr, WINDOW: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """`replay_kernel` with the accepted tokens folded into one half of the state's columns after the other, as
    `step_kernel` has them; their keys and decays are made first, into keys_decays [B, H, DRAFT, 2, D] fp32, so that
    only the recurrence itself is a chain, and few registers are held along it.
    """
    h = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, D)
    e = tl.arange(0, D // 2)
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
    keys_decays += (n * H + h) * (DRAFT * 2 * D)
    _prepare(x, z, tail, taps, keys_decays, bias, rate, lower, first, count, x_row, z_row, h, width, D, BOUNDED)
    tl.debug_barrier()  # keys and decays are there
    for half in tl.static_range(2):
        columns = e + half * (D // 2)
        _fold(x, beta, tail, taps, corner, keys_decays, first, count, x_row, beta_row, h, width, columns, D)
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
    tl.debug_barrier()  # all have read the tail, and both halves of the state are there
    if count > 0:
        _store_tail(tail, aq, ak, av, bq, bk, bv, cq, ck, cv, width)
    if WINDOW > 0:
        S = tl.load(_columns(corner, d, D))
        for t in range(WINDOW):
            r = first + DRAFT + t
            xq, xk, xv, raw, b = _row(x, z, beta, r, x_row, z_row, beta_row, col, h, width)
            q = _unit(_conv(aq, bq, cq, xq, taps + col, row)) * (D**-0.5)
            k = _unit(_conv(ak, bk, ck, xk, taps + col + width, row))
            v = _conv(av, bv, cv, xv, taps + col + 2 * width, row)
            alpha = tl.exp2(log2_decay(raw + bias, rate, lower, BOUNDED))
            S, out = _recur(S, q, k, tl.sum(q * k, 0), v, alpha, tl.sigmoid(b))
            aq, ak, av = bq, bk, bv
            bq, bk, bv = cq, ck, cv
            cq, ck, cv = xq, xk, xv
            scale = tl.rsqrt(tl.sum(out * out, 0) / D + eps)
            _put(o + (n * WINDOW + t) * o_row + h * D, gate + r * gate_row + h * D, norm_weight, d, out, scale, True)


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
    ak, av = _keys_values(tail, width)
    bk, bv = _keys_values(tail + row, width)
    ck, cv = _keys_values(tail + 2 * row, width)
    first = n * (DRAFT + WINDOW)
    for t in range(count):
        _, xk, xv, raw, b = _row(x, z, beta, first + t, x_row, z_row, beta_row, col, h, width)
        k = _unit(_conv(ak, bk, ck, xk, taps + col + width, row))
        v = _conv(av, bv, cv, xv, taps + col + 2 * width, row)
        alpha = tl.exp2(log2_decay(raw + bias, rate, lower, BOUNDED))
        S, _ = _recur(S, k, k, 0.0, v, alpha, tl.sigmoid(b))
        ak, av = bk, bv
        bk, bv = ck, cv
        ck, cv = xk, xv
    aq = _behind(x + col, tail, first, count, 3, x_row, row)
    bq = _behind(x + col, tail, first, count, 2, x_row, row)
    cq = _behind(x + col, tail, first, count, 1, x_row, row)
    tl.debug_barrier()  # all have read the tail
    if count > 0:
        tl.store(states + at * page_states + h * D * D + d[:, None] * D + e[None, :], S)
        _store_tail(tail, aq, ak, av, bq, bk, bv, cq, ck, cv, width)
    for t in range(WINDOW):
        r = first + DRAFT + t
        xq, xk, xv, raw, b = _row(x, z, beta, r, x_row, z_row, beta_row, col, h, width)
        q = _unit(_conv(aq, bq, cq, xq, taps + col, row)) * (D**-0.5)
        k = _unit(_conv(ak, bk, ck, xk, taps + col + width, row))
        v = _conv(av, bv, cv, xv, taps + col + 2 * width, row)
        alpha = tl.exp2(log2_decay(raw + bias, rate, lower, BOUNDED))
        S, out = _recur(S, q, k, tl.sum(q * k, 0), v, alpha, tl.sigmoid(b))
        aq, ak, av = bq, bk, bv
        bq, bk, bv = cq, ck, cv
        cq, ck, cv = xq, xk, xv
        scale = tl.rsqrt(tl.sum(out * out, 0) / D + eps)
        _put(o + (n * WINDOW + t) * o_row + h * D, gate + r * gate_row + h * D, norm_weight, d, out, scale, True)

"""KDA decode over states in pages, in one launch: drafted tokens that were accepted are folded into the state, and a
window of tokens runs on from there. A plain step is a window of one token that is kept.

One program a (head, sequence). First everything that does not wait for the state is made for all tokens at once, a
row of threads a token: convolution, norms and decay, as rows of q, k, v and decay in a scratch of the program's own.
Then the state passes through registers in PARTS parts of its columns, fp32, each read once and written once. A part is
held as chunks of R rows, so that a thread reads its few elements of k and of the decay straight from the scratch, and
sums over keys stay inside a thread but for the last R. Sums and products are in one order, with fused multiply-adds
spelt out: replay leaves the bits of as many steps.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment,var-annotated"

import triton
import triton.language as tl

from forebay.kernels.kda_chunks_triton import log2_decay

CONV_WIDTH = 4
TOKEN = tl.constexpr(4)  # rows of scratch a token: q, k, v (later o before its norm) and decay


@triton.jit
def _given(x, tail, taps, first, t, count, live, d, x_row, row, DRAFT: tl.constexpr, CONV: tl.constexpr):
    """Tokens t of x [T, D], fp32, after convolution and SiLU where asked. What lies before the first drafted token is
    in the tail; what lies before the window is the last accepted one.
    """
    own = tl.load(x + (first + t) * x_row + d, mask=live, other=0.0).to(tl.float32)
    if not CONV:
        return own
    y = tl.zeros(own.shape, tl.float32)
    for back in tl.static_range(3, 0, -1):
        place = tl.where(t < DRAFT, t, count + t - DRAFT) - back
        at = tl.where(t >= DRAFT + back, t - back, place)
        source = tl.where(place >= 0, x + (first + at) * x_row, tail + (3 + place) * row)
        earlier = tl.load(source + d, mask=live, other=0.0).to(tl.float32)
        y = tl.fma(earlier, tl.load(taps + (3 - back) * row).to(tl.float32), y)
    y = tl.fma(own, tl.load(taps + 3 * row).to(tl.float32), y)
    return y / (1.0 + tl.exp(-y))


@triton.jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@triton.jit
def _prepare(
    x, z, tail, taps, to, bias, rate, lower, first, t, count, d, x_row, z_row, width,
    D: tl.constexpr, DRAFT: tl.constexpr, WINDOW: tl.constexpr, BOUNDED: tl.constexpr, CONV: tl.constexpr,
):  # fmt: skip
    """Scratch rows of tokens t [T, 1]; `to`: where those of token 0 begin."""
    row = 3 * width
    live = (t < count) | ((t >= DRAFT) & (t < DRAFT + WINDOW))
    to += t * (TOKEN * D) + d
    k = _given(x + width, tail + width, taps + width, first, t, count, live, d, x_row, row, DRAFT, CONV)
    values = 2 * width
    v = _given(x + values, tail + values, taps + values, first, t, count, live, d, x_row, row, DRAFT, CONV)
    tl.store(to + D, _unit(k), mask=live)
    tl.store(to + 2 * D, v, mask=live)
    if WINDOW > 0:
        shown = live & (t >= DRAFT)
        q = _given(x, tail, taps, first, t, count, shown, d, x_row, row, DRAFT, CONV)
        tl.store(to, _unit(q) * (D**-0.5), mask=shown)
    raw = tl.load(z + (first + t) * z_row + d, mask=live, other=0.0).to(tl.float32)
    tl.store(to + 3 * D, tl.exp2(log2_decay(raw + bias, rate, lower, BOUNDED)), mask=live)


@triton.jit
def _kept_inputs(x, tail, first, kept, part, of_part, x_row, row):
    """The last three inputs kept, oldest first; part: of q, k and v, which lie at of_part."""
    found = ()
    for back in tl.static_range(3, 0, -1):
        source = tl.where(kept >= back, x + (first + kept - back) * x_row, tail + (3 + kept - back) * row)
        found += (tl.load(source + of_part, mask=part < 3, other=0.0),)
    return found


@triton.jit
def _store_tail(tail, inputs, part, of_part, row):
    for i in tl.static_range(3):
        tl.store(tail + i * row + of_part, inputs[i].to(tail.dtype.element_ty), mask=part < 3)


@triton.jit
def _load_state(at, D: tl.constexpr, R: tl.constexpr):
    S = ()
    for i in tl.static_range(D // R):
        S += (tl.load(at + i * R * D),)
    return S


@triton.jit
def _store_state(at, S, D: tl.constexpr, R: tl.constexpr):
    for i in tl.static_range(D // R):
        tl.store(at + i * R * D, S[i])


@triton.jit
def _recur(S, scratch, values, beta, m, beta_row, r, D: tl.constexpr, R: tl.constexpr):
    """Token m on S, chunks [R, columns] of its rows: S <- diag(decay) S, then S <- S + k (b (v - S^T k))^T. `values`:
    where v of token 0 lies, [R, columns] of equal rows.
    """
    token = scratch + m * TOKEN * D
    v = tl.load(values + m * TOKEN * D)
    b = tl.sigmoid(tl.load(beta + m * beta_row).to(tl.float32))
    decayed, keys = (), ()
    read = tl.zeros(v.shape, tl.float32)
    for i in tl.static_range(D // R):
        keys += (tl.broadcast_to(tl.load(token + D + i * R + r)[:, None], v.shape),)
        decayed += (S[i] * tl.load(token + 3 * D + i * R + r)[:, None],)
        read = tl.fma(decayed[i], keys[i], read)
    u = (v - tl.sum(read, 0)[None, :]) * b
    made = ()
    for i in tl.static_range(D // R):
        made += (tl.fma(keys[i], u, decayed[i]),)
    return made


@triton.jit
def _read(S, token, r, BV: tl.constexpr, D: tl.constexpr, R: tl.constexpr):
    """S^T q [BV], of a token whose scratch begins at `token`."""
    out = tl.zeros((R, BV), tl.float32)
    for i in tl.static_range(D // R):
        out = tl.fma(S[i], tl.broadcast_to(tl.load(token + i * R + r)[:, None], (R, BV)), out)
    return tl.sum(out, 0)


@triton.jit
def _normed(y, weight, opened, eps, D: tl.constexpr):
    """y [T, D] after norm and output gate."""
    scale = tl.rsqrt(tl.sum(y * y, 1) / D + eps)[:, None]
    return y * scale * (weight * tl.sigmoid(opened.to(tl.float32)))


@triton.jit
def decode_kernel(
    x, z, beta, gate, taps, A_log, dt_bias, norm_weight, states, tails, page, accepted, scratch, o,
    lower, eps, x_row, z_row, beta_row, gate_row, o_row, page_states, page_tails, H,
    D: tl.constexpr, T: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, DRAFT: tl.constexpr, WINDOW: tl.constexpr,
    KEEP: tl.constexpr, BOUNDED: tl.constexpr, CONV: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Program (head, sequence). Rows n * (DRAFT + WINDOW) + t of x, z, beta and gate: first the DRAFT drafted tokens,
    of which the first accepted[n] change the page (tail too), then WINDOW tokens that leave no trace but their outputs,
    o [B * WINDOW, H D]; KEEP: the window's one token changes the page as well. x is q|k|v before the convolution
    (after SiLU without CONV), z the raw gate, beta logits, gate the output gate's logits. `page_*`: elements from page
    to page of the states and of the tails. T: tokens prepared side by side. scratch [B, H, DRAFT + WINDOW, TOKEN, D]
    fp32.
    """
    BV: tl.constexpr = D // PARTS
    h = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, D)[None, :]
    t = tl.arange(0, T)[:, None]
    r = tl.arange(0, R)
    e = tl.arange(0, BV)
    flat = tl.zeros((T, D), tl.int32) + d
    width = H * D
    row = 3 * width
    first = n * (DRAFT + WINDOW)
    at = tl.load(page + n).to(tl.int64)
    corner = states + at * page_states + h * D * D + r[:, None] * D + e[None, :]
    if DRAFT == 0:  # asked for first, needed last; beside many tokens' preparation it would not fit the registers
        S = _load_state(corner, D, R)
    count = tl.load(accepted + n) if DRAFT > 0 else tl.full((), 0, tl.int32)
    kept = count + 1 if KEEP else count
    x += h * D
    z += h * D
    beta += first * beta_row + h
    gate += (first + DRAFT) * gate_row + h * D
    tail = tails + at * page_tails + h * D
    scratch += (n * H + h) * ((DRAFT + WINDOW) * TOKEN * D)
    part = tl.arange(0, 4)[:, None]  # of q, k, v; and none
    of_part = part * width + d
    if CONV:
        last = _kept_inputs(x, tail, first, kept, part, of_part, x_row, row)
    opened = ()
    if NORM:
        weight = tl.load(norm_weight + flat).to(tl.float32)
        for g in tl.static_range(0, WINDOW, T):
            opened += (tl.load(gate + (t + g) * gate_row + d, mask=t + g < WINDOW, other=0.0),)
    rate = tl.exp(tl.load(A_log + h).to(tl.float32))
    bias = tl.load(dt_bias + h * D + flat).to(tl.float32)
    for g in range(0, DRAFT + WINDOW, T):
        _prepare(
            x, z, tail, taps + h * D + flat, scratch, bias, rate, lower, first, t + g, count, d, x_row, z_row, width,
            D, DRAFT, WINDOW, BOUNDED, CONV,
        )  # fmt: skip
    tl.debug_barrier()  # the scratch is there, and all have read the tail
    if CONV and kept > 0:
        _store_tail(tail, last, part, of_part, row)

    for p in tl.static_range(PARTS):
        here = corner + p * BV
        if DRAFT > 0 or p > 0:
            S = _load_state(here, D, R)
        values = scratch + 2 * D + p * BV + tl.zeros((R, BV), tl.int32) + e[None, :]
        if DRAFT > 0:
            for m in range(count):
                S = _recur(S, scratch, values, beta, m, beta_row, r, D, R)
            if count > 0:
                _store_state(here, S, D, R)
        for m in range(DRAFT, DRAFT + WINDOW):
            S = _recur(S, scratch, values, beta, m, beta_row, r, D, R)
            out = _read(S, scratch + m * TOKEN * D, r, BV, D, R)
            tl.store(scratch + (m * TOKEN + 2) * D + p * BV + e, out)
        if KEEP:
            _store_state(here, S, D, R)
    tl.debug_barrier()  # all outputs are there
    for g in tl.static_range(0, WINDOW, T):
        shown = t + g < WINDOW
        y = tl.load(scratch + ((DRAFT + t + g) * TOKEN + 2) * D + d, mask=shown, other=0.0)
        if NORM:
            y = _normed(y, weight, opened[g // T], eps, D)
        tl.store(o + (n * WINDOW + t + g) * o_row + h * D + d, y.to(o.dtype.element_ty), mask=shown)

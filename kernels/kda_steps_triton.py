"""KDA decode: one fused step over a batch of states in pages, and replay of accepted draft tokens.

One program a (head, sequence): the head's state [D, D] is read once into registers and written once, fp32; everything
else of a token (convolution tails and taps, gate, norm weight) is a few vectors. S^T k and S^T q of the decayed state are
summed together, so that o = S^T q + u (k . q) needs no second pass over the updated state.
"""

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
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def _conv(a, b, c, x, taps, width, row):
    """Four taps [4, channels] over three earlier inputs and x, then SiLU."""
    y = a * tl.load(taps).to(tl.float32) + b * tl.load(taps + row).to(tl.float32)
    y += c * tl.load(taps + 2 * row).to(tl.float32) + x * tl.load(taps + 3 * row).to(tl.float32)
    return _silu(y)


@triton.jit
def _recur(S, q, k, v, raw, b, rate, lower, D: tl.constexpr, BOUNDED: tl.constexpr):
    """One token on S [K, V]: (S, o). q and k before their norm."""
    q = _unit(q) * (D**-0.5)
    k = _unit(k)
    S = S * tl.exp2(log2_decay(raw, rate, lower, BOUNDED))[:, None]
    read = tl.sum(S * k[:, None], 0)
    out = tl.sum(S * q[:, None], 0)
    u = b * (v - read)
    return S + k[:, None] * u[None, :], out + u * tl.sum(q * k, 0)


@triton.jit
def _normed(o, gate, weight, eps, D: tl.constexpr):
    """RMSNorm of o [D], times sigmoid(gate)."""
    return o * tl.rsqrt(tl.sum(o * o, 0) / D + eps) * weight * tl.sigmoid(gate)


@triton.jit
def step_kernel(
    x, z, beta, gate, taps, A_log, dt_bias, norm_weight, states, tails, page, o,
    lower, eps, x_stride, z_stride, beta_stride, gate_stride, o_stride, page_states, page_tails, H,
    D: tl.constexpr, BOUNDED: tl.constexpr, CONV: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Program (head, sequence). x [B, 3 H D] is q|k|v before the convolution (after SiLU without CONV), z the raw gate,
    beta logits, gate the output gate's logits. `page_*`: elements from page to page of the states and of the tails.
    """
    h = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, D)
    e = tl.arange(0, D)
    width = H * D
    col = h * D + d
    at = tl.load(page + n).to(tl.int64)
    corner = states + at * page_states + h * D * D + d[:, None] * D + e[None, :]
    S = tl.load(corner)
    xq, xk, xv = _vectors(x + n * x_stride + col, width)
    raw = tl.load(z + n * z_stride + col).to(tl.float32) + tl.load(dt_bias + col).to(tl.float32)
    b = tl.sigmoid(tl.load(beta + n * beta_stride + h).to(tl.float32))
    rate = tl.exp(tl.load(A_log + h).to(tl.float32))
    if CONV:
        tail = tails + at * page_tails + col
        row = 3 * width
        aq, ak, av = _vectors(tail, width)
        bq, bk, bv = _vectors(tail + row, width)
        cq, ck, cv = _vectors(tail + 2 * row, width)
        q = _conv(aq, bq, cq, xq, taps + col, width, row)
        k = _conv(ak, bk, ck, xk, taps + col + width, width, row)
        v = _conv(av, bv, cv, xv, taps + col + 2 * width, width, row)
        _store_tail(tail, bq, bk, bv, cq, ck, cv, xq, xk, xv, width)
    else:
        q, k, v = xq, xk, xv
    S, out = _recur(S, q, k, v, raw, b, rate, lower, D, BOUNDED)
    tl.store(corner, S)
    if NORM:
        opened = tl.load(gate + n * gate_stride + col).to(tl.float32)
        out = _normed(out, opened, tl.load(norm_weight + d).to(tl.float32), eps, D)
    tl.store(o + n * o_stride + col, out.to(o.dtype.element_ty))


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
def replay_kernel(
    x, z, beta, gate, taps, A_log, dt_bias, norm_weight, states, tails, page, accepted, o,
    lower, eps, x_row, z_row, beta_row, gate_row, o_row, page_states, page_tails, H,
    D: tl.constexpr, DRAFT: tl.constexpr, WINDOW: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Program (head, sequence). Rows n * (DRAFT + WINDOW) + t of x, z, beta and gate: first the DRAFT drafted tokens, of
    which the first accepted[n] are folded into the state in the page (tail too), then WINDOW tokens that run on from it
    and leave no trace but their outputs, o [B, WINDOW, H, D] by rows.
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
    corner = states + at * page_states + h * D * D + d[:, None] * D + e[None, :]
    S = tl.load(corner)
    bias = tl.load(dt_bias + col).to(tl.float32)
    rate = tl.exp(tl.load(A_log + h).to(tl.float32))
    tail = tails + at * page_tails + col
    aq, ak, av = _vectors(tail, width)
    bq, bk, bv = _vectors(tail + row, width)
    cq, ck, cv = _vectors(tail + 2 * row, width)
    first = n * (DRAFT + WINDOW)
    for t in range(count + WINDOW):
        r = first + tl.where(t < count, t, t - count + DRAFT)
        xq, xk, xv = _vectors(x + r * x_row + col, width)
        raw = tl.load(z + r * z_row + col).to(tl.float32) + bias
        b = tl.sigmoid(tl.load(beta + r * beta_row + h).to(tl.float32))
        q = _conv(aq, bq, cq, xq, taps + col, width, row)
        k = _conv(ak, bk, ck, xk, taps + col + width, width, row)
        v = _conv(av, bv, cv, xv, taps + col + 2 * width, width, row)
        aq, ak, av = bq, bk, bv
        bq, bk, bv = cq, ck, cv
        cq, ck, cv = xq, xk, xv
        S, out = _recur(S, q, k, v, raw, b, rate, lower, D, BOUNDED)
        if t == count - 1:
            tl.store(corner, S)
            _store_tail(tail, aq, ak, av, bq, bk, bv, cq, ck, cv, width)
        if t >= count:
            opened = tl.load(gate + r * gate_row + col).to(tl.float32)
            out = _normed(out, opened, tl.load(norm_weight + d).to(tl.float32), eps, D)
            tl.store(o + (n * WINDOW + t - count) * o_row + col, out.to(o.dtype.element_ty))

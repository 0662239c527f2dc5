"""KDA decode: one fused step over a batch of states in pages.

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
def vectors(at, width):
    """q, k and v of a row whose three parts lie `width` elements apart."""
    return (
        tl.load(at).to(tl.float32),
        tl.load(at + width).to(tl.float32),
        tl.load(at + 2 * width).to(tl.float32),
    )


@triton.jit
def keys_values(at, width):
    """k and v of such a row."""
    return tl.load(at + width).to(tl.float32), tl.load(at + 2 * width).to(tl.float32)


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def unit(x):
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def token_row(x, z, beta, r, x_row, z_row, beta_row, col, h, width):
    """q, k, v before the convolution, raw gate and beta logit of row r."""
    q, k, v = vectors(x + r * x_row + col, width)
    raw = tl.load(z + r * z_row + col).to(tl.float32)
    return q, k, v, raw, tl.load(beta + r * beta_row + h).to(tl.float32)


@triton.jit
def conv(a, b, c, x, taps, row):
    """Four taps [4, channels] over three earlier inputs and x, then SiLU."""
    y = a * tl.load(taps).to(tl.float32) + b * tl.load(taps + row).to(tl.float32)
    y += c * tl.load(taps + 2 * row).to(tl.float32) + x * tl.load(taps + 3 * row).to(tl.float32)
    return _silu(y)


@triton.jit
def recur(S, q, k, qk, v, alpha, b):
    """One token on S [K, V]: (S, o), with q and k normalised and qk their product."""
    S = S * alpha[:, None]
    read = tl.sum(S * k[:, None], 0)
    out = tl.sum(S * q[:, None], 0)
    u = b * (v - read)
    return S + k[:, None] * u[None, :], out + u * qk


@triton.jit
def conv_from(tail, x, taps, row):
    """Convolve channels whose earlier inputs lie in three rows of the tail."""
    one = tl.load(tail).to(tl.float32)
    two = tl.load(tail + row).to(tl.float32)
    return conv(one, two, tl.load(tail + 2 * row).to(tl.float32), x, taps, row)


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
def store_tail(tail, aq, ak, av, bq, bk, bv, cq, ck, cv, width):
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
def columns(corner, e, D: tl.constexpr):
    """Where the value columns e of a state lie."""
    return corner + tl.arange(0, D)[:, None] * D + e[None, :]


@triton.jit
def _step_columns(corner, v, q, k, qk, alpha, b, e, D: tl.constexpr):
    """The value columns e: o before its norm; the state is written back."""
    at = columns(corner, e, D)
    S, out = recur(tl.load(at), q, k, qk, v, alpha, b)
    tl.store(at, S)
    return out


@triton.jit
def values_of(x, tail, taps, e, row, CONV: tl.constexpr):
    v = tl.load(x + e).to(tl.float32)
    if CONV:
        v = conv_from(tail + e, v, taps + e, row)
    return v


@triton.jit
def put(o, gate, weight, e, out, scale, NORM: tl.constexpr):
    """Store o, after norm and output gate where asked."""
    if NORM:
        opened = tl.sigmoid(tl.load(gate + e).to(tl.float32))
        out = out * scale * tl.load(weight + e).to(tl.float32) * opened
    tl.store(o + e, out.to(o.dtype.element_ty))


@triton.jit
def step_kernel(
    x, z, beta, gate, taps, A_log, dt_bias, norm_weight, states, tails, page, o,
    lower, eps, x_stride, z_stride, beta_stride, gate_stride, o_stride, page_states, page_tails, H,
    D: tl.constexpr, HALVES: tl.constexpr, BOUNDED: tl.constexpr, CONV: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Program (head, sequence). x [B, 3 H D] is q|k|v before the convolution (after SiLU without CONV), z the raw gate,
    beta logits, gate the output gate's logits. `page_*`: elements from page to page of the states and of the tails.
    HALVES: the state passes through registers in two halves of its columns.
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
    q = tl.load(x + n * x_stride + col).to(tl.float32)
    k = tl.load(x + n * x_stride + width + col).to(tl.float32)
    raw = tl.load(z + n * z_stride + col).to(tl.float32) + tl.load(dt_bias + col).to(tl.float32)
    b = tl.sigmoid(tl.load(beta + n * beta_stride + h).to(tl.float32))
    alpha = tl.exp2(log2_decay(raw, tl.exp(tl.load(A_log + h).to(tl.float32)), lower, BOUNDED))
    if CONV:
        q = conv_from(tail + col, q, taps + col, row)
        k = conv_from(tail + width + col, k, taps + width + col, row)
    q = unit(q) * (D**-0.5)
    k = unit(k)
    qk = tl.sum(q * k, 0)
    values = 2 * width + h * D
    x_v = x + n * x_stride + values
    to = o + n * o_stride + h * D
    opening = gate + n * gate_stride + h * D
    if HALVES:
        e = tl.arange(0, D // 2)
        f = e + D // 2
        v = values_of(x_v, tail + values, taps + values, e, row, CONV)
        v_f = values_of(x_v, tail + values, taps + values, f, row, CONV)
        first = _step_columns(corner, v, q, k, qk, alpha, b, e, D)
        second = _step_columns(corner, v_f, q, k, qk, alpha, b, f, D)
        scale = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / D + eps)
        put(to, opening, norm_weight, e, first, scale, NORM)
        put(to, opening, norm_weight, f, second, scale, NORM)
    else:
        v = values_of(x_v, tail + values, taps + values, d, row, CONV)
        out = _step_columns(corner, v, q, k, qk, alpha, b, d, D)
        put(to, opening, norm_weight, d, out, tl.rsqrt(tl.sum(out * out, 0) / D + eps), NORM)
    if CONV:
        for part in tl.static_range(3):
            _shift(tail + part * width + col, x + n * x_stride + part * width + col, row)

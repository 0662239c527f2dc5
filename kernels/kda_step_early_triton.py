"""KDA decode, one fused step as `kda_steps_triton` has it, in another order: all that comes from memory is asked for
before anything is computed, the state in parts of its columns, each while the one before it is worked on.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment,var-annotated"

import triton
import triton.language as tl

from forebay.kernels.kda_chunks_triton import log2_decay
from forebay.kernels.kda_steps_triton import columns, conv_from, recur, store_tail, unit, values_of


@triton.jit
def _shift_all(tail, x, row, width):
    """The tail of q, k and v, whose channels lie `width` apart, moves up by one token, behind one barrier."""
    q_two, q_three, q_fresh = tl.load(tail + row), tl.load(tail + 2 * row), tl.load(x)
    k_two, k_three, k_fresh = tl.load(tail + row + width), tl.load(tail + 2 * row + width), tl.load(x + width)
    values = tail + 2 * width
    v_two, v_three, v_fresh = tl.load(values + row), tl.load(values + 2 * row), tl.load(x + 2 * width)
    tl.debug_barrier()  # all have read the tail
    store_tail(tail, q_two, k_two, v_two, q_three, k_three, v_three, q_fresh, k_fresh, v_fresh, width)


@triton.jit
def step_early_kernel(
    x, z, beta, gate, taps, A_log, dt_bias, norm_weight, states, tails, page, o,
    lower, eps, x_stride, z_stride, beta_stride, gate_stride, o_stride, page_states, page_tails, H,
    D: tl.constexpr, PARTS: tl.constexpr, AHEAD: tl.constexpr, BOUNDED: tl.constexpr, CONV: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """`step_kernel`, the state in PARTS parts of its columns. AHEAD: a part is asked for before the one in front of it
    is worked on, else behind it; the first always before everything.
    """
    P: tl.constexpr = D // PARTS
    h = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, D)
    e = tl.arange(0, P)
    width = H * D
    row = 3 * width
    col = h * D + d
    values = 2 * width + h * D
    at = tl.load(page + n).to(tl.int64)
    corner = states + at * page_states + h * D * D
    tail = tails + at * page_tails
    x += n * x_stride
    o += n * o_stride + h * D
    gate += n * gate_stride + h * D

    S = tl.load(columns(corner, e, D))
    q = tl.load(x + col).to(tl.float32)
    k = tl.load(x + width + col).to(tl.float32)
    raw = tl.load(z + n * z_stride + col).to(tl.float32) + tl.load(dt_bias + col).to(tl.float32)
    b = tl.sigmoid(tl.load(beta + n * beta_stride + h).to(tl.float32))
    v = ()
    opened = ()
    for part in tl.static_range(PARTS):
        v += (values_of(x + values, tail + values, taps + values, e + part * P, row, CONV),)
        if NORM:
            weight = tl.load(norm_weight + e + part * P).to(tl.float32)
            opened += (tl.sigmoid(tl.load(gate + e + part * P).to(tl.float32)) * weight,)
    alpha = tl.exp2(log2_decay(raw, tl.exp(tl.load(A_log + h).to(tl.float32)), lower, BOUNDED))
    if CONV:
        q = conv_from(tail + col, q, taps + col, row)
        k = conv_from(tail + width + col, k, taps + width + col, row)
        _shift_all(tail + col, x + col, row, width)
    q = unit(q) * (D**-0.5)
    k = unit(k)
    qk = tl.sum(q * k, 0)
    out = ()
    squares = 0.0
    for part in tl.static_range(PARTS):
        at_part = columns(corner, e + part * P, D)
        if AHEAD and part + 1 < PARTS:
            following = tl.load(columns(corner, e + (part + 1) * P, D))
        S, made = recur(S, q, k, qk, v[part], alpha, b)
        tl.store(at_part, S)
        out += (made,)
        squares += tl.sum(made * made, 0)
        if part + 1 < PARTS:
            if AHEAD:  # noqa: SIM108
                S = following
            else:
                S = tl.load(columns(corner, e + (part + 1) * P, D))
    scale = tl.rsqrt(squares / D + eps)
    for part in tl.static_range(PARTS):
        y = out[part]
        if NORM:
            y = y * scale * opened[part]
        tl.store(o + e + part * P, y.to(o.dtype.element_ty))

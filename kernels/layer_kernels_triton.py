"""The small operators between a layer's large ones: add and norm, gated units, the rows of a page, and a prefill's
convolution and gated norm. Each reads its inputs once and rounds where its torch twin does.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

import triton
import triton.language as tl

from forebay.kernels.moe_products_triton import glu


@triton.jit
def _normed(x, weight, d, inside, eps, D: tl.constexpr, kind: tl.constexpr):
    """`norms.rms_norm` of a row x, fp32 in and out, rounded as that rounds."""
    scale = tl.rsqrt(tl.sum(x * x) / D + eps)
    factor = tl.load(weight + d, mask=inside, other=0.0).to(kind).to(tl.float32)
    return (x * scale).to(kind).to(tl.float32) * factor


@triton.jit
def add_norm_kernel(
    prefix, first, second, weight, grown, normed, eps, prefix_row, first_row, second_row,
    D: tl.constexpr, WIDTH: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """Program t: prefix plus ADDED outputs (0, 1 or 2), rounded after each, and its RMSNorm; grown, normed [T, D]."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH)
    inside = d < D
    kind = normed.dtype.element_ty
    x = tl.load(prefix + t * prefix_row + d, mask=inside, other=0.0).to(tl.float32)
    if ADDED > 0:
        y = tl.load(first + t * first_row + d, mask=inside, other=0.0).to(tl.float32)
        if ADDED > 1:
            y += tl.load(second + t * second_row + d, mask=inside, other=0.0).to(tl.float32)
            y = y.to(kind).to(tl.float32)
        x = (x + y).to(kind).to(tl.float32)
        tl.store(grown + t * D + d, x.to(kind), mask=inside)
    tl.store(normed + t * D + d, _normed(x, weight, d, inside, eps, D, kind).to(kind), mask=inside)


@triton.jit
def glu_kernel(
    gate, up, to, beta, linear_beta, gate_row, up_row, to_row, W,
    BLOCK: tl.constexpr, SITU: tl.constexpr,
):  # fmt: skip
    """Program (row, block of columns): `moe.glu` of gate and up [T, W] into `to`."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < W
    g = tl.load(gate + t * gate_row + d, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + t * up_row + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(to + t * to_row + d, glu(g, u, beta, linear_beta, SITU).to(to.dtype.element_ty), mask=inside)


@triton.jit
def write_rows_kernel(
    latent, shared, weight, positions, table, pool, eps, latent_row, shared_row, table_row, EACH,
    RANK: tl.constexpr, WIDTH: tl.constexpr, PE: tl.constexpr, PE_WIDTH: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Program t: the row (RMSNorm(latent), shared) of token t goes to its sequence's page at positions[t]."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH)
    e = tl.arange(0, PE_WIDTH)
    kind = pool.dtype.element_ty
    x = tl.load(latent + t * latent_row + d, mask=d < RANK, other=0.0).to(tl.float32)
    row = _normed(x, weight, d, d < RANK, eps, RANK, kind)
    position = tl.load(positions + t).to(tl.int64)
    page = tl.load(table + t // EACH * table_row + position // PAGE).to(tl.int64)
    at = pool + (page * PAGE + position % PAGE) * (RANK + PE)
    tl.store(at + d, row.to(kind), mask=d < RANK)
    more = tl.load(shared + t * shared_row + e, mask=e < PE, other=0.0)
    tl.store(at + RANK + e, more.to(kind), mask=e < PE)


@triton.jit
def _input(x, tail, t, c, some, x_row, tail_row, LAGS: tl.constexpr):
    """Inputs of tokens t [B] in channels c; those before the first token stand in the tail."""
    here = tl.load(x + t.to(tl.int64)[:, None] * x_row + c[None, :], mask=some & (t >= 0)[:, None], other=0.0)
    before = tl.load(tail + (t + LAGS)[:, None] * tail_row + c[None, :], mask=some & (t < 0)[:, None], other=0.0)
    return tl.where((t >= 0)[:, None], here.to(tl.float32), before.to(tl.float32))


@triton.jit
def conv_kernel(
    x, taps, tail, y, T, C, x_row,
    LAGS: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Program (block of tokens, block of channels): `conv.short_conv` of x [T, C], taps [LAGS + 1, C], tail [LAGS, C]
    of earlier inputs, which stays as it is; y [T, C].
    """
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    some = (t < T)[:, None] & (c < C)[None, :]
    total = tl.zeros((BLOCK, CHANNELS), tl.float32)
    for lag in tl.static_range(LAGS + 1):
        tap = tl.load(taps + (LAGS - lag) * C + c, mask=c < C, other=0.0).to(tl.float32)
        total += _input(x, tail, t - lag, c, some, x_row, C, LAGS) * tap[None, :]
    made = total / (1.0 + tl.exp(-total))
    tl.store(y + t.to(tl.int64)[:, None] * C + c[None, :], made.to(y.dtype.element_ty), mask=some)


@triton.jit
def gated_norm_kernel(
    o, gate, weight, to, eps, N, o_row, gate_row, H,
    D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program: BLOCK of the N = T H heads; `norms.gated_rms_norm` of o [T, H, D] by weight [D] and gate [T, H D]."""
    n = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    d = tl.arange(0, WIDTH)
    some = (n < N)[:, None] & (d < D)[None, :]
    within = (n % H * D)[:, None] + d[None, :]
    x = tl.load(o + (n // H * o_row)[:, None] + within, mask=some, other=0.0).to(tl.float32)
    opened = tl.sigmoid(tl.load(gate + (n // H * gate_row)[:, None] + within, mask=some, other=0.0).to(tl.float32))
    scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
    factor = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    made = x * scale[:, None] * factor[None, :] * opened
    tl.store(to + (n * D)[:, None] + d[None, :], made.to(to.dtype.element_ty), mask=some)

"""The two grouped products of routed experts over MXFP4 weights as they are stored.

Weights are the left operand: they go from memory to shared memory packed, and unpack in the registers from which the
tensor cores take them (`mxfp4_triton`); the tokens of an expert are the columns of the right operand. A program takes
(tile of tokens, slice of output rows) pairs from a list that `moe_group_triton` left on the device, slices of one
tile after another, so that each weight is read once and an expert's few rows of activations stay in the L2 cache.

A tile has M rows of activations, or M + REST: two products that share their unpacked weights, for sizes between
powers of two.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

import triton
import triton.language as tl

from forebay.kernels.mxfp4_triton import BYTES, GROUPS, UP, row_order, unpack

COLUMNS = tl.constexpr(128)


@triton.jit
def _tile(tiles, tile, limit):
    """Expert, first entry and entry count of a tile."""
    at = tiles + tile
    return tl.load(at).to(tl.int64), tl.load(at + limit), tl.load(at + 2 * limit)


@triton.jit
def _product(
    w, s, x, x_rest, live, live_rest,
    K: tl.constexpr, ROWS: tl.constexpr, M: tl.constexpr, REST: tl.constexpr, WARPS: tl.constexpr,
    STAGES: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """Weights [ROWS, K] times M tokens, and times REST more: ([ROWS, M], [ROWS, REST]). w, s: where each row's bytes
    and scales start; x, x_rest: where each token's columns do. A step's scales are asked for a step ahead.
    """
    b = tl.arange(0, BYTES)[None, :]
    # Said to lie unaligned, so that a thread loads a byte, in the layout in which it is wanted, and not two.
    s_at = tl.multiple_of(s[:, None] + tl.arange(0, GROUPS)[None, :], [1, 1])
    c = tl.arange(0, COLUMNS)[None, :]
    acc = tl.zeros((ROWS, M), tl.float32)
    rest = tl.zeros((ROWS, REST if REST else M), tl.float32)
    scale = tl.load(s_at)
    for k in tl.range(0, K // COLUMNS, num_stages=STAGES):
        packed = tl.load(w[:, None] + k * BYTES + b, eviction_policy="evict_first")
        ahead = tl.load(s_at + tl.minimum(k + 1, K // COLUMNS - 1) * GROUPS)
        some = tl.load(x[:, None] + k * COLUMNS + c, mask=live[:, None], other=0.0)
        weights = unpack(packed, scale, ROWS, WARPS, LOW)
        acc = tl.dot(weights, tl.trans(some), acc, input_precision="ieee")
        if REST:
            more = tl.load(x_rest[:, None] + k * COLUMNS + c, mask=live_rest[:, None], other=0.0)
            rest = tl.dot(weights, tl.trans(more), rest, input_precision="ieee")
        scale = ahead
    return acc * UP, rest * UP


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def glu(gate, up, beta, linear_beta, SITU: tl.constexpr):
    """`moe.glu` of fp32."""
    opened = 1.0 / (1.0 + tl.exp(-gate))
    if SITU:
        return _tanh(gate / beta) * _tanh(up / linear_beta) * (beta * linear_beta) * opened
    return gate * opened * up


@triton.jit
def _column(place):
    """`moe_columns.order` of a place."""
    within = place % COLUMNS
    nibble = within // 64
    return place - within + within % 8 // 2 * 32 + within % 64 // 8 * 4 + within % 2 * 2 + nibble


@triton.jit
def _put_glu(
    h, acc, entry, live, place, beta, linear_beta,
    N: tl.constexpr, ROWS: tl.constexpr, M: tl.constexpr, SITU: tl.constexpr,
):  # fmt: skip
    """Store the gated rows of entries, out of a product whose rows are 8 of the gate, 8 of the up projection, ..."""
    gate, up = acc.reshape([ROWS // 16, 2, 8, M]).permute([0, 2, 3, 1]).split()
    made = glu(gate, up, beta, linear_beta, SITU).reshape([ROWS // 2, M])
    at = h + entry.to(tl.int64)[None, :] * N + place[:, None]
    tl.store(at, made.to(h.dtype.element_ty), mask=live[None, :])


@triton.jit
def gate_up_kernel(
    z, w1, w1_scale, w3, w3_scale, order, tiles, count, h, beta, linear_beta, limit,
    PER_TOKEN: tl.constexpr, K: tl.constexpr, N: tl.constexpr, SITU: tl.constexpr,
    ROWS: tl.constexpr, M: tl.constexpr, REST: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr,
    LOW: tl.constexpr,
):  # fmt: skip
    """h [entries, N] = glu(w1 z, w3 z) of each entry's token, both sides' columns in the kernels' order. A slice is
    ROWS / 2 outputs. z [T, K]; w1, w3 [E, N, K / 2] and scales [E, N, K / 32]; order [entries]: PER_TOKEN * token +
    choice; tiles [3, limit]: expert, first entry, entries.
    """
    SLICE: tl.constexpr = ROWS // 2
    SLICES: tl.constexpr = N // SLICE
    HALF: tl.constexpr = 8 * WARPS
    r = tl.arange(0, ROWS)
    own = r // (2 * HALF) * HALF + r % HALF
    is_up = r // HALF % 2 == 1
    m = tl.arange(0, M)
    for at in tl.range(tl.program_id(0), tl.load(count) * SLICES, tl.num_programs(0)):
        expert, first, entries = _tile(tiles, at // SLICES, limit)
        place = at % SLICES * SLICE
        row = expert * N + _column(place + own)
        live = m < entries
        token = tl.load(order + first + m, mask=live, other=0) // PER_TOKEN
        if REST:
            q = tl.arange(0, REST)
            live_rest = q < entries - M
            token_rest = tl.load(order + first + M + q, mask=live_rest, other=0) // PER_TOKEN
        else:
            live_rest = live
            token_rest = token
        acc, rest = _product(
            tl.multiple_of(tl.where(is_up, w3, w1) + row * (K // 2), [16]),
            tl.where(is_up, w3_scale, w1_scale) + row * (K // 32),
            z + token.to(tl.int64) * K, z + token_rest.to(tl.int64) * K, live, live_rest,
            K, ROWS, M, REST, WARPS, STAGES, LOW,
        )  # fmt: skip
        outputs = place + tl.arange(0, SLICE)
        _put_glu(h, acc, first + m, live, outputs, beta, linear_beta, N, ROWS, M, SITU)
        if REST:
            _put_glu(h, rest, first + M + q, live_rest, outputs, beta, linear_beta, N, ROWS, REST, SITU)


@triton.jit
def down_kernel(
    h, w2, w2_scale, order, tiles, count, y, limit,
    K: tl.constexpr, N: tl.constexpr,
    ROWS: tl.constexpr, M: tl.constexpr, REST: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr,
    LOW: tl.constexpr,
):  # fmt: skip
    """y [T * PER_TOKEN, N]: w2 h of each entry, at its token's choice. h [entries, K] as `gate_up_kernel` leaves it;
    w2 [E, N, K / 2], its scales [E, N, K / 32].
    """
    SLICES: tl.constexpr = N // ROWS
    r = tl.arange(0, ROWS)
    m = tl.arange(0, M)
    for at in tl.range(tl.program_id(0), tl.load(count) * SLICES, tl.num_programs(0)):
        expert, first, entries = _tile(tiles, at // SLICES, limit)
        start = at % SLICES * ROWS
        row = expert * N + start + r
        live = m < entries
        entry = (first + m).to(tl.int64)
        if REST:
            q = tl.arange(0, REST)
            live_rest = q < entries - M
            entry_rest = (first + M + q).to(tl.int64)
        else:
            live_rest = live
            entry_rest = entry
        acc, rest = _product(
            w2 + row * (K // 2), w2_scale + row * (K // 32), h + entry * K, h + entry_rest * K, live, live_rest,
            K, ROWS, M, REST, WARPS, STAGES, LOW,
        )  # fmt: skip
        outputs = start + row_order(r, WARPS)
        choice = tl.load(order + first + m, mask=live, other=0).to(tl.int64)
        kind = y.dtype.element_ty
        tl.store(y + choice[None, :] * N + outputs[:, None], acc.to(kind), mask=live[None, :])
        if REST:
            choice_rest = tl.load(order + first + M + q, mask=live_rest, other=0).to(tl.int64)
            tl.store(y + choice_rest[None, :] * N + outputs[:, None], rest.to(kind), mask=live_rest[None, :])

"""The two grouped products of routed experts over MXFP4 weights as they are stored.

Weights are the left operand: they go from memory to shared memory packed, and unpack in the registers from which the
tensor cores take them (`mxfp4_triton`); the tokens of an expert are the columns of the right operand. A program takes
(tile of tokens, slice of output rows) pairs from a list that `moe_group_triton` left on the device, slices of one
tile after another, so that each weight is read once and an expert's few rows of activations stay in the L2 cache.

A tile has M rows of activations, or M + REST: two products that share their unpacked weights, for sizes between
powers of two.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment"

import triton
import triton.language as tl

from forebay.kernels.mxfp4_triton import COLUMNS, GROUPS, UP, WORDS, column, row_order, side, unpack

LOG2_E = tl.constexpr(1.4426950408889634)
OPENED = tl.constexpr("""
{
.reg .f32 t;
ex2.approx.ftz.f32 t, $1;
add.ftz.f32 t, t, 1.0;
rcp.approx.ftz.f32 $0, t;
}
""")


@triton.jit
def _tile(tiles, tile, limit):
    """Expert, first entry and entry count of a tile."""
    at = tiles + tile
    return tl.load(at).to(tl.int64), tl.load(at + limit), tl.load(at + 2 * limit)


@triton.jit
def _scales(at, step, K: tl.constexpr, BLOCKS: tl.constexpr):
    """The scale bytes of a step's blocks; of the last step again beyond the end."""
    first = tl.minimum(step, K // COLUMNS // BLOCKS - 1) * (BLOCKS * GROUPS)
    if BLOCKS == 1:
        made = (tl.load(at + first),)
    elif BLOCKS == 2:
        made = (tl.load(at + first), tl.load(at + first + GROUPS))
    else:
        tl.static_assert(BLOCKS == 4)
        low = (tl.load(at + first), tl.load(at + first + GROUPS))
        made = (low[0], low[1], tl.load(at + first + 2 * GROUPS), tl.load(at + first + 3 * GROUPS))
    return made


@triton.jit
def _product(
    w, s, x, x_rest, live, live_rest,
    K: tl.constexpr, ROWS: tl.constexpr, M: tl.constexpr, REST: tl.constexpr, WARPS: tl.constexpr,
    STAGES: tl.constexpr, BLOCKS: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """Weights [ROWS, K] times M tokens, and times REST more: ([ROWS, M], [ROWS, REST]). w, s: where each row's bytes
    and scales start; x, x_rest: where each token's columns do. A step's scales are asked for a step ahead.
    """
    tl.static_assert(K % (128 * BLOCKS) == 0)
    b = tl.arange(0, WORDS)[None, :]
    # Said to lie unaligned, so that a thread loads a byte, in the layout in which it is wanted, and not two.
    s_at = tl.multiple_of(s[:, None] + tl.arange(0, GROUPS)[None, :], [1, 1])
    c = tl.arange(0, COLUMNS)[None, :]
    acc = tl.zeros((ROWS, M), tl.float32)
    rest = tl.zeros((ROWS, REST if REST else M), tl.float32)
    scales = _scales(s_at, 0, K, BLOCKS)
    for step in tl.range(0, K // COLUMNS // BLOCKS, num_stages=STAGES):
        ahead = _scales(s_at, step + 1, K, BLOCKS)
        for block in tl.static_range(BLOCKS):
            k = step * BLOCKS + block
            packed = tl.load(w[:, None] + k * WORDS + b, eviction_policy="evict_first")
            some = tl.load(x[:, None] + k * COLUMNS + c, mask=live[:, None], other=0.0)
            weights = unpack(packed, scales[block], ROWS, WARPS, side(M), LOW)
            acc = tl.dot(weights, tl.trans(some), acc, input_precision="ieee")
            if REST:
                more = tl.load(x_rest[:, None] + k * COLUMNS + c, mask=live_rest[:, None], other=0.0)
                rest = tl.dot(weights, tl.trans(more), rest, input_precision="ieee")
        scales = ahead
    return acc * UP, rest * UP


@triton.jit
def _opened(x, LOW: tl.constexpr):
    """1 / (1 + 2^x), without the care for subnormals and huge divisors that exp and a division take."""
    if LOW.is_bf16():
        made = tl.inline_asm_elementwise(OPENED, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        made = 1.0 / (1.0 + tl.exp2(x))
    return made


@triton.jit
def glu(gate, up, beta, linear_beta, SITU: tl.constexpr, LOW: tl.constexpr = tl.float32):
    """`moe.glu` of fp32, as precise as its result in LOW needs."""
    opened = _opened(gate * -LOG2_E, LOW)
    if SITU:
        tanh_gate = 1.0 - 2.0 * _opened(gate * (2 * LOG2_E / beta), LOW)
        tanh_up = 1.0 - 2.0 * _opened(up * (2 * LOG2_E / linear_beta), LOW)
        made = tanh_gate * tanh_up * (beta * linear_beta) * opened
    else:
        made = gate * opened * up
    return made


@triton.jit
def _put_glu(
    h, acc, entry, live, place, beta, linear_beta,
    N: tl.constexpr, ROWS: tl.constexpr, M: tl.constexpr, SITU: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """Store the gated rows of entries, out of a product whose rows are 8 of the gate, 8 of the up projection, ..."""
    gate, up = acc.reshape([ROWS // 16, 2, 8, M]).permute([0, 2, 3, 1]).split()
    made = glu(gate, up, beta, linear_beta, SITU, LOW).reshape([ROWS // 2, M])
    at = h + entry.to(tl.int64)[None, :] * N + place[:, None]
    tl.store(at, made.to(h.dtype.element_ty), mask=live[None, :])


@triton.jit
def gate_up_kernel(
    z, w1, w1_scale, w3, w3_scale, order, tiles, count, h, beta, linear_beta, limit,
    PER_TOKEN: tl.constexpr, K: tl.constexpr, N: tl.constexpr, SITU: tl.constexpr,
    ROWS: tl.constexpr, M: tl.constexpr, REST: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr,
    BLOCKS: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """h [entries, N] = glu(w1 z, w3 z) of each entry's token, both sides' columns in the kernels' order. A slice is
    ROWS / 2 outputs. z [T, K]; w1, w3 [E, N, K / 4] words and scales [E, N, K / 32]; order [entries]: PER_TOKEN *
    token + choice; tiles [3, limit]: expert, first entry, entries.
    """
    SLICE: tl.constexpr = ROWS // 2
    tl.static_assert(N % SLICE == 0)
    SLICES: tl.constexpr = N // SLICE
    HALF: tl.constexpr = 8 * WARPS
    r = tl.arange(0, ROWS)
    own = r // (2 * HALF) * HALF + r % HALF
    is_up = r // HALF % 2 == 1
    m = tl.arange(0, M)
    for at in tl.range(tl.program_id(0), tl.load(count) * SLICES, tl.num_programs(0)):
        expert, first, entries = _tile(tiles, at // SLICES, limit)
        place = at % SLICES * SLICE
        row = expert * N + column(place + own, side(M))
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
            tl.multiple_of(tl.where(is_up, w3, w1) + row * (K // 4), [16]),
            tl.where(is_up, w3_scale, w1_scale) + row * (K // 32),
            z + token.to(tl.int64) * K, z + token_rest.to(tl.int64) * K, live, live_rest,
            K, ROWS, M, REST, WARPS, STAGES, BLOCKS, LOW,
        )  # fmt: skip
        outputs = place + tl.arange(0, SLICE)
        _put_glu(h, acc, first + m, live, outputs, beta, linear_beta, N, ROWS, M, SITU, LOW)
        if REST:
            _put_glu(h, rest, first + M + q, live_rest, outputs, beta, linear_beta, N, ROWS, REST, SITU, LOW)


@triton.jit
def down_kernel(
    h, w2, w2_scale, order, tiles, count, y, limit,
    K: tl.constexpr, N: tl.constexpr,
    ROWS: tl.constexpr, M: tl.constexpr, REST: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr,
    BLOCKS: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """y [T * PER_TOKEN, N]: w2 h of each entry, at its token's choice. h [entries, K] as `gate_up_kernel` leaves it;
    w2 [E, N, K / 4] words, its scales [E, N, K / 32].
    """
    SLICES: tl.constexpr = N // ROWS
    tl.static_assert(N % ROWS == 0)
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
            w2 + row * (K // 4), w2_scale + row * (K // 32), h + entry * K, h + entry_rest * K, live, live_rest,
            K, ROWS, M, REST, WARPS, STAGES, BLOCKS, LOW,
        )  # fmt: skip
        outputs = start + row_order(r, WARPS)
        choice = tl.load(order + first + m, mask=live, other=0).to(tl.int64)
        kind = y.dtype.element_ty
        tl.store(y + choice[None, :] * N + outputs[:, None], acc.to(kind), mask=live[None, :])
        if REST:
            choice_rest = tl.load(order + first + M + q, mask=live_rest, other=0).to(tl.int64)
            tl.store(y + choice_rest[None, :] * N + outputs[:, None], rest.to(kind), mask=live_rest[None, :])

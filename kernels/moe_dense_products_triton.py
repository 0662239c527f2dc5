"""The two grouped products of routed experts over plain weights (bf16): `moe_products_triton` has those over MXFP4.

Weights are the left operand, an expert's tokens the columns of the right one: few tokens fill the narrow side, and each
weight is read once. A program takes (tile of tokens, slice of output rows) pairs from a list on the device, slices of
one tile after another.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

import triton
import triton.language as tl

from forebay.kernels.moe_products_triton import glu


@triton.jit
def _tile(tiles, tile, limit):
    """Expert, first entry and entry count of a tile."""
    at = tiles + tile
    return tl.load(at).to(tl.int64), tl.load(at + limit), tl.load(at + 2 * limit)


@triton.jit
def dense_gate_up_kernel(
    z, w1, w3, order, tiles, count, h, beta, linear_beta, limit,
    PER_TOKEN: tl.constexpr, K: tl.constexpr, N: tl.constexpr, SITU: tl.constexpr, ROWS: tl.constexpr,
    M: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """h [entries, N] = glu(w1 z, w3 z) of each entry's token. z [T, K]; w1, w3 [E, N, K]; order [entries]: PER_TOKEN *
    token + choice; tiles [3, limit]: expert, first entry, entries.
    """
    SLICES: tl.constexpr = N // ROWS
    r = tl.arange(0, ROWS)
    m = tl.arange(0, M)
    c = tl.arange(0, DEPTH)
    for at in tl.range(tl.program_id(0), tl.load(count) * SLICES, tl.num_programs(0)):
        expert, first, entries = _tile(tiles, at // SLICES, limit)
        live = m < entries
        token = tl.load(order + first + m, mask=live, other=0) // PER_TOKEN
        outputs = at % SLICES * ROWS + r
        weights = (expert * N + outputs)[:, None] * K + c[None, :]
        inputs = z + token.to(tl.int64)[:, None] * K + c[None, :]
        gate = tl.zeros((ROWS, M), tl.float32)
        up = tl.zeros((ROWS, M), tl.float32)
        for k in tl.range(0, K, DEPTH, num_stages=STAGES):
            x = tl.trans(tl.load(inputs + k, mask=live[:, None], other=0.0).to(LOW))
            gate = tl.dot(tl.load(w1 + weights + k).to(LOW), x, gate, input_precision="ieee")
            up = tl.dot(tl.load(w3 + weights + k).to(LOW), x, up, input_precision="ieee")
        made = glu(gate, up, beta, linear_beta, SITU).to(h.dtype.element_ty)
        tl.store(h + (first + m).to(tl.int64)[None, :] * N + outputs[:, None], made, mask=live[None, :])


@triton.jit
def dense_down_kernel(
    h, w2, order, tiles, count, y, limit,
    K: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, M: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """y [T * PER_TOKEN, N]: w2 h of each entry, at its token's choice. h [entries, K]; w2 [E, N, K]."""
    SLICES: tl.constexpr = N // ROWS
    r = tl.arange(0, ROWS)
    m = tl.arange(0, M)
    c = tl.arange(0, DEPTH)
    for at in tl.range(tl.program_id(0), tl.load(count) * SLICES, tl.num_programs(0)):
        expert, first, entries = _tile(tiles, at // SLICES, limit)
        live = m < entries
        outputs = at % SLICES * ROWS + r
        weights = w2 + (expert * N + outputs)[:, None] * K + c[None, :]
        inputs = h + (first + m).to(tl.int64)[:, None] * K + c[None, :]
        acc = tl.zeros((ROWS, M), tl.float32)
        for k in tl.range(0, K, DEPTH, num_stages=STAGES):
            x = tl.trans(tl.load(inputs + k, mask=live[:, None], other=0.0).to(LOW))
            acc = tl.dot(tl.load(weights + k).to(LOW), x, acc, input_precision="ieee")
        choice = tl.load(order + first + m, mask=live, other=0).to(tl.int64)
        made = acc.to(y.dtype.element_ty)
        tl.store(y + choice[None, :] * N + outputs[:, None], made, mask=live[None, :])

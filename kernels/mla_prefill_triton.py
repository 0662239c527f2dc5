"""Causal latent attention of a prefill over expanded keys and values, a segment of the keys a launch.

Expanding a row to the keys and values of all heads costs what about 170 queries save by it, so a chunk of several
hundred queries is cheaper un-absorbed. The expanded rows of a long context would not fit beside it: they come in
segments, and maximum (base 2), sum and accumulator of every query are carried from one to the next, fp32.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

import triton
import triton.language as tl

from forebay.kernels.mla_latent_triton import LOWEST


@triton.jit
def _tiles(
    acc, top, weight, q_nope, q_shared, keys, rows, i, begin, end, seen, scale,
    NOPE: tl.constexpr, PE: tl.constexpr, V: tl.constexpr, TILE: tl.constexpr, ROW: tl.constexpr, key_row,
    MASK: tl.constexpr, LOW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Keys begin .. end-1 of a segment, in tiles from `begin` on; MASK where a query might not see all of a tile."""
    d = tl.arange(0, NOPE)
    e = tl.arange(0, PE)
    v = tl.arange(0, V)
    for first in tl.range(begin, end, TILE, num_stages=STAGES):
        j = first + tl.arange(0, TILE)
        some = (j < end)[:, None]
        at = j.to(tl.int64)[:, None]
        nope = tl.load(keys + at * key_row + d[None, :], mask=some, other=0.0).to(LOW)
        shared = tl.load(rows + at * ROW + e[None, :], mask=some, other=0.0).to(LOW)
        values = tl.load(keys + at * key_row + NOPE + v[None, :], mask=some, other=0.0).to(LOW)
        s = tl.dot(q_nope, tl.trans(nope), input_precision="ieee")
        s = tl.dot(q_shared, tl.trans(shared), acc=s, input_precision="ieee") * scale
        if MASK:
            s = tl.where((j[None, :] < end) & (j[None, :] <= i[:, None] + seen), s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        keep = tl.exp2(top - higher)
        p = tl.exp2(s - higher[:, None])
        weight = weight * keep + tl.sum(p, 1)
        acc = tl.dot(p.to(LOW), values, acc=acc * keep[:, None], input_precision="ieee")
        top = higher
    return acc, top, weight


@triton.jit
def prefill_kernel(
    q, keys, rows, o, tops, weights, carried, scale, T, S, seen, q_row, key_row, H,
    NOPE: tl.constexpr, PE: tl.constexpr, RANK: tl.constexpr, V: tl.constexpr, QUERIES: tl.constexpr,
    TILE: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, LOW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (head, block of queries): q [T, H, NOPE + PE] with a row stride; keys [S, H, NOPE + V], a segment's
    expanded rows, and rows [S, RANK + PE], the rows themselves; query i sees the keys up to i + seen.

    tops and weights [T, H] and carried [T, H, V] come in but for the FIRST segment, and go out but for the LAST, which
    writes o [T, H, V].
    """
    h = tl.program_id(0)
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest first
    i = block * QUERIES + tl.arange(0, QUERIES)
    d = tl.arange(0, NOPE)
    e = tl.arange(0, PE)
    v = tl.arange(0, V)
    some = i < T
    own = q + i.to(tl.int64)[:, None] * q_row + h * (NOPE + PE)
    q_nope = tl.load(own + d[None, :], mask=some[:, None], other=0.0).to(LOW)
    q_shared = tl.load(own + NOPE + e[None, :], mask=some[:, None], other=0.0).to(LOW)
    at = i.to(tl.int64) * H + h
    if FIRST:
        top = tl.full((QUERIES,), LOWEST, tl.float32)
        weight = tl.zeros((QUERIES,), tl.float32)
        acc = tl.zeros((QUERIES, V), tl.float32)
    else:
        top = tl.load(tops + at, mask=some, other=LOWEST)
        weight = tl.load(weights + at, mask=some, other=0.0)
        acc = tl.load(carried + at[:, None] * V + v[None, :], mask=some[:, None], other=0.0)
    keys += h * (NOPE + V)
    rows += RANK
    end = tl.minimum(S, block * QUERIES + QUERIES + seen)
    whole = tl.maximum(tl.minimum(S, block * QUERIES + seen + 1), 0) // TILE * TILE  # seen by every query of the block
    acc, top, weight = _tiles(
        acc, top, weight, q_nope, q_shared, keys, rows, i, 0, whole, seen, scale,
        NOPE, PE, V, TILE, RANK + PE, key_row, False, LOW, STAGES,
    )  # fmt: skip
    acc, top, weight = _tiles(
        acc, top, weight, q_nope, q_shared, keys, rows, i, whole, end, seen, scale,
        NOPE, PE, V, TILE, RANK + PE, key_row, True, LOW, STAGES,
    )  # fmt: skip
    if LAST:
        acc = acc / tl.maximum(weight, 1e-30)[:, None]
        tl.store(o + at[:, None] * V + v[None, :], acc.to(o.dtype.element_ty), mask=some[:, None])
    else:
        tl.store(tops + at, top, mask=some)
        tl.store(weights + at, weight, mask=some)
        tl.store(carried + at[:, None] * V + v[None, :], acc, mask=some[:, None])

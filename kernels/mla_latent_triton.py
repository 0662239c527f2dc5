"""Absorbed latent attention on pages: every head of a query reads the same rows, all of them or the chosen ones.

A program takes HEADS heads of one query over a part of its rows, tile by tile with a running maximum: scores are
q . row over all of a row, values are its first RANK elements, so a tile is loaded once for both products. Where batch
and heads do not fill the device a query's rows are split over programs, each leaves its maximum, its sum and its
weighted rows, and `merge_kernel` adds them in order: the same inputs give the same bits, however the programs ran.

LOW is the type of the products (fp32 where the inputs are: Triton's interpreter has no sound bf16).
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1.0e30)  # a maximum of nothing: finite, so that no difference of two is undefined


@triton.jit
def _tile_rows(table, chosen, tile, j, n, t, PER, table_row, chosen_row, PAGE: tl.constexpr, SPARSE: tl.constexpr):
    """Rows j of query t's tile, as they are counted through the whole pool."""
    if SPARSE:
        return tl.load(chosen + t * chosen_row + j, mask=j < n, other=0).to(tl.int64)
    # A tile lies inside a page, so one look-up does for it.
    first = tile * j.shape[0]
    page = tl.load(table + t // PER * table_row + first // PAGE).to(tl.int64)
    return page * PAGE + (first % PAGE + j - first)


@triton.jit
def latent_kernel(
    q, rows, table, chosen, lengths, o, tops, weights,
    scale, q_row, table_row, chosen_row, PER, H,
    RANK: tl.constexpr, PE: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
    SPARSE: tl.constexpr, SPLIT: tl.constexpr, LOW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (block of heads, part, query t). q [T, H, RANK + PE] with a row stride; rows [pool rows, RANK + PE], all
    pages one after another, PAGE rows each; table [T / PER, pages] int32 with a row stride. lengths [T] int32: t sees
    the rows of positions 0 .. length-1, or, SPARSE, the first length of chosen [T, k] int32, rows of the pool.

    o [T, H, RANK]; with SPLIT fp32 [T, parts, H, RANK] not yet divided by the sum, beside tops (of base 2) and weights
    [T, parts, H].
    """
    ROW: tl.constexpr = RANK + PE
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    t = tl.program_id(2).to(tl.int64)
    h = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    r = tl.arange(0, RANK)
    e = RANK + tl.arange(0, PE)
    some = (h < H)[:, None]
    n = tl.load(lengths + t)
    own = q + t * q_row + h[:, None] * ROW
    q_latent = tl.load(own + r[None, :], mask=some, other=0.0).to(LOW)
    q_shared = tl.load(own + e[None, :], mask=some, other=0.0).to(LOW)
    top = tl.full((HEADS,), LOWEST, tl.float32)
    weight = tl.zeros((HEADS,), tl.float32)
    acc = tl.zeros((HEADS, RANK), tl.float32)
    each = tl.cdiv(tl.cdiv(n, TILE), parts)
    last = tl.minimum((part + 1) * each, tl.cdiv(n, TILE))
    for tile in tl.range(part * each, last, num_stages=STAGES):
        j = tile * TILE + tl.arange(0, TILE)
        live = j < n
        at = _tile_rows(table, chosen, tile, j, n, t, PER, table_row, chosen_row, PAGE, SPARSE) * ROW
        latent = tl.load(rows + at[:, None] + r[None, :], mask=live[:, None], other=0.0).to(LOW)
        shared = tl.load(rows + at[:, None] + e[None, :], mask=live[:, None], other=0.0).to(LOW)
        s = tl.dot(q_shared, tl.trans(shared), input_precision="ieee")
        s = tl.dot(q_latent, tl.trans(latent), acc=s, input_precision="ieee") * scale
        s = tl.where(live[None, :], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        keep = tl.exp2(top - higher)
        p = tl.exp2(s - higher[:, None])
        weight = weight * keep + tl.sum(p, 1)
        acc = tl.dot(p.to(LOW), latent, acc=acc * keep[:, None], input_precision="ieee")
        top = higher
    if SPLIT:
        at = (t * parts + part) * H + h
        tl.store(tops + at, top, mask=h < H)
        tl.store(weights + at, weight, mask=h < H)
        tl.store(o + at[:, None] * RANK + r[None, :], acc, mask=some)
    else:
        acc = acc / tl.maximum(weight, 1e-30)[:, None]
        tl.store(o + (t * H + h)[:, None] * RANK + r[None, :], acc.to(o.dtype.element_ty), mask=some)


@triton.jit
def merge_kernel(
    parts, tops, weights, o, RANK: tl.constexpr, PARTS: tl.constexpr, MAX: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (slice of columns, head, query): parts [T, PARTS, H, RANK] into o [T, H, RANK]; MAX = PARTS rounded up to
    a power of two.
    """
    h = tl.program_id(1)
    t = tl.program_id(2).to(tl.int64)
    i = tl.arange(0, MAX)
    r = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = (t * PARTS + i) * tl.num_programs(1) + h
    some = i < PARTS
    top = tl.load(tops + at, mask=some, other=LOWEST)
    factor = tl.exp2(top - tl.max(top, 0))
    weight = tl.sum(factor * tl.load(weights + at, mask=some, other=0.0), 0)
    x = tl.load(parts + at[:, None] * RANK + r[None, :], mask=some[:, None], other=0.0)
    out = tl.sum(x * factor[:, None], 0) / tl.maximum(weight, 1e-30)
    tl.store(o + (t * tl.num_programs(1) + h) * RANK + r, out.to(o.dtype.element_ty))

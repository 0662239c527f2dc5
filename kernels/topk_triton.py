"""Exact top-k of each row in three launches, without sorting.

Floats are compared as integers in their order. The first launch keeps maxima of groups of a row's elements, at least
2 K of them; a bound that K maxima reach is reached by at least K elements, and, unless nearly equal elements lie
bunched, by few more. The second finds that bound and lists the places of those elements, in order. The third finds the
threshold among the few by bisection: where exactly K elements reach it the search ends, else equal elements at the cut
go by position. The lists are in order, so the result is ascending; nothing depends on how threads ran.

A row is cut in pieces, so that few rows fill the device too; each program of the second launch finds the bound again,
which is quicker than a launch of its own. The third, one program a row, holds up to W listed elements in registers.
More (a row of equal elements) are read again at every step: slower, and as exact.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

import triton
import triton.language as tl

NOTHING = tl.constexpr(-2139095041)  # ordered(-inf): what is not above it is never chosen


@triton.jit
def ordered(x):
    """Integers in the order of the floats; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _reaching(key, bound):
    return tl.sum((key >= bound).to(tl.int32), 0)


@triton.jit
def _keys_at(own, at, n):
    """Keys of elements `at` of a row of n. Loads end at a multiple of 16, so that a thread may load several at once."""
    x = tl.load(own + at, mask=at < tl.cdiv(n, 16) * 16, other=float("-inf"))
    return tl.where(at < n, ordered(x), NOTHING)


@triton.jit
def maxima_kernel(
    scores, lengths, maxima, scores_row, piece, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Program (piece, row): the largest of each of GROUPS groups of elements piece * p .. of a row of scores [T, ..]
    fp32, as far as lengths [T] int32 goes, as integers: maxima [T, pieces, GROUPS]. `piece` is a multiple of BLOCK, the
    row's stride (scores_row) and BLOCK are multiples of 16.
    """
    p = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    start = p * piece
    n = tl.maximum(tl.minimum(tl.load(lengths + row) - start, piece), 0)
    own = scores + row * scores_row + start
    group = tl.arange(0, GROUPS)
    i = tl.arange(0, BLOCK // GROUPS)[:, None] * GROUPS + group[None, :]
    best = tl.full((GROUPS,), NOTHING, tl.int32)
    for first in range(0, n, BLOCK):
        best = tl.maximum(best, tl.max(_keys_at(own, first + i, n), 0))
    tl.store(maxima + (row * tl.num_programs(0) + p) * GROUPS + group, best)


@triton.jit
def _lower_bound(best, K, SLACK):
    """A bound that K of the maxima reach, and where there are as many not many more than K + SLACK."""
    low = tl.maximum(tl.min(best, 0), NOTHING + 1).to(tl.int64)
    high = tl.max(best, 0).to(tl.int64) + 1
    reached = _reaching(best, low.to(tl.int32))
    while (high - low > 1) & (reached > K + SLACK):
        middle = low + (high - low) // 2
        count = _reaching(best, middle.to(tl.int32))
        if count >= K:
            low = middle
            reached = count
        else:
            high = middle
    return low


@triton.jit
def list_kernel(
    scores, lengths, maxima, found, listed, bounds, scores_row, found_row, piece, groups, K, SLACK,
    BLOCK: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Program (piece, row): the places of all elements of the piece that reach a bound which K of the row's maxima
    [T, groups] reach. found [T, pieces, piece] int32 with a row stride, listed [T, pieces]: how many; bounds [T, 2]:
    the bound and the largest element, as integers. W >= groups.
    """
    p = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    start = p * piece
    n = tl.maximum(tl.minimum(tl.load(lengths + row) - start, piece), 0)
    own = scores + row * scores_row + start
    to = found + row * found_row + start
    group = tl.arange(0, W)
    best = tl.load(maxima + row * groups + group, mask=group < groups, other=NOTHING)
    low = _lower_bound(best, K, SLACK).to(tl.int32)
    if p == 0:
        tl.store(bounds + 2 * row, low)
        tl.store(bounds + 2 * row + 1, tl.max(best, 0))
    count = 0
    for first in range(0, n, BLOCK):
        at = first + tl.arange(0, BLOCK)
        keep = _keys_at(own, at, n) >= low
        ones = keep.to(tl.int32)
        tl.store(to + count + tl.cumsum(ones, 0) - 1, start + at, mask=keep)
        count += tl.sum(ones, 0)
    tl.store(listed + row * tl.num_programs(0) + p, count)


@triton.jit
def _listed(listed, PIECES: tl.constexpr):
    """How many elements of a row are listed."""
    count = 0
    for p in tl.static_range(PIECES):
        count += tl.load(listed + p)
    return count


@triton.jit
def _keys_of(own, found, listed, j, count, piece, PIECES: tl.constexpr):
    """Keys of the listed elements j of a row, and their places in it."""
    at = j
    before = 0
    for p in tl.static_range(PIECES):
        at = tl.where(j >= before, j - before + p * piece, at)
        before += tl.load(listed + p)
    place = tl.load(found + at, mask=j < count, other=0)
    x = tl.load(own + place, mask=j < count, other=float("-inf"))
    return ordered(x), place


@triton.jit
def choose_kernel(
    scores, found, listed, bounds, table, idx, slots, counts, scores_row, found_row, table_row, PER, piece, K,
    PIECES: tl.constexpr, W: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Program (row): of the listed elements the K largest above -inf. idx [T, K] int32: their positions ascending, -1
    behind them; slots as idx: the pool's rows that hold those positions, by table [T / PER, pages] int32, undefined
    behind them; counts [T]: how many.
    """
    row = tl.program_id(0).to(tl.int64)
    own = scores + row * scores_row
    found += row * found_row
    listed += row * PIECES
    out = row * K
    i = tl.arange(0, W)
    low = tl.load(bounds + 2 * row).to(tl.int64)
    high = tl.load(bounds + 2 * row + 1).to(tl.int64) + 1
    count = _listed(listed, PIECES)
    mine, mine_at = _keys_of(own, found, listed, i, count, piece, PIECES)
    reached = count
    above = 0
    while (high - low > 1) & (reached > K):
        middle = low + (high - low) // 2
        bound = middle.to(tl.int32)
        here = _reaching(mine, bound)
        for first in range(W, count, W):
            key, _ = _keys_of(own, found, listed, first + i, count, piece, PIECES)
            here += _reaching(key, bound)
        if here >= K:
            low = middle
            reached = here
        else:
            high = middle
            above = here

    cut = low.to(tl.int32)
    room = tl.where(reached > K, K - above, reached)  # for elements equal to the cut
    written = 0
    equals = 0
    for first in range(0, count, W):
        key, place = mine, mine_at
        if first > 0:
            key, place = _keys_of(own, found, listed, first + i, count, piece, PIECES)
        same = (key == cut).to(tl.int32)
        rank = equals + tl.cumsum(same, 0)
        take = (key > cut) | ((key == cut) & (rank <= room))
        ones = take.to(tl.int32)
        to = out + written + tl.cumsum(ones, 0) - 1
        tl.store(idx + to, place, mask=take)
        page = tl.load(table + row // PER * table_row + place // PAGE, mask=take, other=0)
        tl.store(slots + to, page * PAGE + place % PAGE, mask=take)
        equals += tl.sum(same, 0)
        written += tl.sum(ones, 0)
    for first in range(0, K, W):
        rest = (first + i >= written) & (first + i < K)
        tl.store(idx + out + first + i, tl.full((W,), -1, tl.int32), mask=rest)
    tl.store(counts + row, written)

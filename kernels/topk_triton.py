"""Exact top-k of each row in one launch: a program a row, two passes over it, no sorting.

Floats are compared as integers in their order. The first pass keeps W running maxima, of the elements W apart; a bound
that at least K of them reach is reached by at least K elements, and, unless nearly equal elements lie bunched, by
few more. The second pass lists the positions of those in order. Then the threshold is found among the few by
bisection: where exactly K elements reach it the search ends, else equal elements at the cut go by position. The list is
in order, so the result is ascending; nothing depends on how threads ran.

A list of up to W elements is held in registers. A longer one (a row of equal elements) is read again at every step:
slower, and as exact.

A long row is cut in pieces, each leaves its own K largest with their positions, and a second launch chooses among
those.
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
def _keys_of(own, found, j, count):
    """Keys of the listed elements j of a row, and their places in it."""
    place = tl.load(found + j, mask=j < count, other=0)
    x = tl.load(own + place, mask=j < count, other=float("-inf"))
    return ordered(x), place


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
def _listed(own, found, bound, n, W: tl.constexpr, STAGES: tl.constexpr):
    """Lists the places of all elements that reach the bound, in order; returns how many."""
    count = 0
    for first in tl.range(0, n, W, num_stages=STAGES):
        at = first + tl.arange(0, W)
        keep = _keys_at(own, at, n) >= bound
        ones = keep.to(tl.int32)
        tl.store(found + count + tl.cumsum(ones, 0) - 1, at, mask=keep)
        count += tl.sum(ones, 0)
    return count


@triton.jit
def top_k_kernel(
    scores, places, lengths, table, found, idx, slots, values, counts,
    scores_row, places_row, table_row, found_row, PER, piece, K, SLACK,
    W: tl.constexpr, PLACES: tl.constexpr, VALUES: tl.constexpr, PAGE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (piece, row): the K largest, above -inf, of elements piece * p .. of a row, as far as lengths [T] int32
    goes. scores [T, ..] fp32 and found [T, ..] int32 (scratch) have row strides, which are multiples of 16 as
    `piece` is. W >= 2 K.

    idx [T, pieces, K] int32: their positions ascending, -1 behind them (with PLACES, places [T, ..] at those
    positions); values (with VALUES) [T, pieces, K]: their scores, -inf behind them; counts [T, pieces] int32: how
    many. With PAGE, slots as idx: the pool's rows that hold those positions, by table [T / PER, pages] int32;
    undefined behind them.
    """
    p = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    out = (row * tl.num_programs(0) + p) * K
    start = p * piece
    n = tl.maximum(tl.minimum(tl.load(lengths + row) - start, piece), 0)
    own = scores + row * scores_row + start
    found += row * found_row + start
    i = tl.arange(0, W)
    best = tl.full((W,), NOTHING, tl.int32)
    for first in tl.range(0, n, W, num_stages=STAGES):
        best = tl.maximum(best, _keys_at(own, first + i, n))
    low = _lower_bound(best, K, SLACK)
    high = tl.max(best, 0).to(tl.int64) + 1
    count = _listed(own, found, low.to(tl.int32), n, W, STAGES)
    tl.debug_barrier()  # every place has been listed before one is read

    mine, _ = _keys_of(own, found, i, count)
    reached = count
    above = 0
    while (high - low > 1) & (reached > K):
        middle = low + (high - low) // 2
        bound = middle.to(tl.int32)
        here = _reaching(mine, bound)
        for first in range(W, count, W):
            key, _ = _keys_of(own, found, first + i, count)
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
        key, place = _keys_of(own, found, first + i, count)
        same = (key == cut).to(tl.int32)
        rank = equals + tl.cumsum(same, 0)
        take = (key > cut) | ((key == cut) & (rank <= room))
        ones = take.to(tl.int32)
        to = out + written + tl.cumsum(ones, 0) - 1
        position = start + place
        if PLACES:
            position = tl.load(places + row * places_row + position, mask=take, other=0)
        tl.store(idx + to, position, mask=take)
        if PAGE > 0:
            page = tl.load(table + row // PER * table_row + position // PAGE, mask=take, other=0)
            tl.store(slots + to, page * PAGE + position % PAGE, mask=take)
        if VALUES:
            tl.store(values + to, tl.load(own + place, mask=take, other=0.0), mask=take)
        equals += tl.sum(same, 0)
        written += tl.sum(ones, 0)
    for first in range(0, K, W):
        rest = (first + i >= written) & (first + i < K)
        tl.store(idx + out + first + i, tl.full((W,), -1, tl.int32), mask=rest)
        if VALUES:
            tl.store(values + out + first + i, tl.full((W,), float("-inf"), tl.float32), mask=rest)
    tl.store(counts + row * tl.num_programs(0) + p, written)

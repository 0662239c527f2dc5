"""Tokens grouped by expert on the device: nothing here needs the host, so a step with it can stand in a graph.

An entry is one choice of one token, 0 .. N - 1 = token * per_token + choice. Each expert's entries come together, by
rising token, experts by rising id; experts that are not here (of another rank) get none. A tile is a run of at most
SIZES[-1] entries of one expert. What is left of an expert beyond whole tiles of that size makes one tile of the
smallest size that holds it; each size has a list of its own, in order of experts.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

import triton
import triton.language as tl

from forebay.kernels.mxfp4_triton import column


@triton.jit
def _local(chosen, at, N, first, E):
    """Ids of the chosen experts among those that are here; E for the others and beyond the end."""
    e = tl.load(chosen + at, mask=at < N, other=-1).to(tl.int32) - first
    return tl.where((at < N) & (e >= 0) & (e < E), e, E)


@triton.jit
def count_kernel(chosen, counts, N, first, E, BLOCK: tl.constexpr):
    """Adds each expert's entries to counts [E + 1], one program a block of entries."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(counts + _local(chosen, at, N, first, E), 1, mask=at < N)


@triton.jit
def _counts(chosen, counts, N, first, E, BINS: tl.constexpr, BLOCK: tl.constexpr, COUNTED: tl.constexpr):
    """Entries of all experts [BINS], 0 from E on."""
    e = tl.arange(0, BINS)
    if COUNTED:
        found = tl.load(counts + e, mask=e < E, other=0)
    else:
        found = tl.zeros((BINS,), tl.int32)
        for start in range(0, N, BLOCK):
            found += tl.histogram(_local(chosen, start + tl.arange(0, BLOCK), N, first, E), BINS)
    return tl.where(e < E, found, 0)


@triton.jit
def _put_tile(tiles, at, limit, expert, first, entries):
    tl.store(tiles + at, expert)
    tl.store(tiles + at + limit, first)
    tl.store(tiles + at + 2 * limit, entries)


@triton.jit
def _takes(left, SIZES: tl.constexpr, c: tl.constexpr):
    """Whether a rest of so many entries makes a tile of size c."""
    below: tl.constexpr = SIZES[c - 1] if c > 0 else 0
    return (left > below) & (left <= SIZES[c])


@triton.jit
def group_kernel(
    chosen, counts, order, tiles, tile_counts, N, first, E, limit,
    SIZES: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Program e: order [N] of expert e's entries and its tiles, tiles [sizes, 3, limit]: expert, first place in
    `order`, entries; tile_counts [sizes] by program 0. BINS > E is a power of two; with COUNTED, counts [E + 1] are
    read, otherwise counted here.
    """
    LARGEST: tl.constexpr = SIZES[len(SIZES) - 1]
    me = tl.program_id(0)
    e = tl.arange(0, BINS)
    found = _counts(chosen, counts, N, first, E, BINS, BLOCK, COUNTED)
    own = tl.sum(tl.where(e == me, found, 0))
    start = tl.sum(tl.where(e < me, found, 0))
    left = found % LARGEST
    own_left = own % LARGEST
    for c in tl.static_range(len(SIZES)):
        of_size = _takes(left, SIZES, c).to(tl.int32)
        at = 0
        if c == len(SIZES) - 1:
            of_size += found // LARGEST
            at = own // LARGEST
        place = c * 3 * limit + tl.sum(tl.where(e < me, of_size, 0))
        if c == len(SIZES) - 1:
            for whole in range(at):
                _put_tile(tiles, place + whole, limit, me, start + whole * LARGEST, LARGEST)
        if _takes(own_left, SIZES, c):
            _put_tile(tiles, place + at, limit, me, start + own - own_left, own_left)
        if me == 0:
            tl.store(tile_counts + c, tl.sum(of_size))
    if own > 0:
        for block in range(0, N, BLOCK):
            entry = block + tl.arange(0, BLOCK)
            mine = (_local(chosen, entry, N, first, E) == me).to(tl.int32)
            here = tl.sum(mine)
            if here > 0:
                tl.store(order + start + tl.cumsum(mine) - 1, entry, mask=mine == 1)
            start += here


@triton.jit
def arrange_kernel(z, to, stride, K: tl.constexpr, WIDTH: tl.constexpr, SIDE: tl.constexpr):
    """Program t: a token's row in the kernels' order of columns (`moe_columns`). WIDTH >= K is a power of two."""
    t = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDTH)
    inside = place < K
    tl.store(to + t * K + place, tl.load(z + t * stride + column(place, SIDE), mask=inside, other=0.0), mask=inside)

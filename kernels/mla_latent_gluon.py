"""Absorbed latent attention as `mla_latent_triton.latent_kernel`, laid out by hand: what Hopper runs in bf16 for more
than 16 heads.

Two tiles of rows lie in shared memory. The next one is asked for as soon as the products of the one before are done,
while this one's scores are made, so that rows come during all of a tile's work; Triton's own pipeline asks for them
last and then waits. A tile's scores are shared out over both warpgroups by rows, its values by columns; weights go from
one to the other through the shared part of the rows that they were made of.

A weight rounded to bf16 adds half as much error as the output's own rounding does; its remainder, multiplied too
(EXACT), takes that away for half of the second product's time.

Triton's interpreter does not run this language: `mla_latent_triton.latent_kernel` is its twin there, and on a device
the bench checks both against float64 before anything is timed.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,attr-defined"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Names that Triton 3.6 has and later ones have changed.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

RANK, SIDE = 512, 64  # what it is laid out for: values of a row; heads and rows of a tile, and a row's shared part
WARPS = 8
LOWEST = gl.constexpr(-1.0e30)


@gluon.jit
def _rows_of(table, chosen, tile, j, n, PAGE: gl.constexpr, SPARSE: gl.constexpr):
    """Rows of the pool of a tile's places j; behind the last one that one again, so that all hold numbers."""
    place = gl.minimum(tile * j.shape[0] + j, n - 1)
    if SPARSE:
        return gl.load(chosen + place, mask=place >= 0, other=0)
    return gl.load(table + place // PAGE, mask=place >= 0, other=0) * PAGE + place % PAGE


@gluon.jit
def _ask(rows, at, r, e, latent, shared, ROW: gl.constexpr):
    """Starts the copy of the rows `at`."""
    own = rows + at.to(gl.int64)[:, None] * ROW
    copy(latent, own + r[None, :])
    copy(shared, own + e[None, :])
    async_copy.commit_group()


@gluon.jit
def _leave(
    o, tops, weights, acc, top, total, t, part, first_head, H,
    RANK: gl.constexpr, HEADS: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Writes a program's results."""
    rows: gl.constexpr = top.type.layout
    mixed: gl.constexpr = acc.type.layout
    h = first_head + gl.arange(0, HEADS, layout=rows)
    if SPLIT:
        to = (t * gl.num_programs(1) + part) * H + h
        gl.store(tops + to, top, mask=h < H)
        gl.store(weights + to, total, mask=h < H)
        o += (t * gl.num_programs(1) + part) * H * RANK
    else:
        acc = acc / gl.convert_layout(gl.maximum(total, 1e-30), gl.SliceLayout(1, mixed))[:, None]
        o += t * H * RANK
    # Pairs of fp32 leave as they lie; pairs of bf16 would be too narrow.
    written: gl.constexpr = mixed if SPLIT else gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    made = gl.convert_layout(acc.to(o.dtype.element_ty), written)
    h = first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, written))
    c = gl.arange(0, RANK, layout=gl.SliceLayout(0, written))
    gl.store(o + h[:, None] * RANK + c[None, :], made, mask=(h < H)[:, None])


@gluon.jit
def latent_kernel(
    q, rows, table, chosen, lengths, o, tops, weights,
    scale, q_row, table_row, chosen_row, PER, H,
    RANK: gl.constexpr, PE: gl.constexpr, HEADS: gl.constexpr, TILE: gl.constexpr, PAGE: gl.constexpr,
    SPARSE: gl.constexpr, SPLIT: gl.constexpr, EXACT: gl.constexpr,
):  # fmt: skip
    """Arguments, programs and results as `mla_latent_triton.latent_kernel` has; HEADS = TILE = PE."""
    ROW: gl.constexpr = RANK + PE
    BF16: gl.constexpr = gl.bfloat16
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    lies: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    scored: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, TILE // 2, 16])
    mixed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, RANK // 2, 16])

    part = gl.program_id(1)
    t = gl.program_id(2).to(gl.int64)
    first_head = gl.program_id(0) * HEADS
    n = gl.load(lengths + t)
    table += t // PER * table_row
    chosen += t * chosen_row
    j = gl.arange(0, TILE, layout=gl.SliceLayout(1, copied))
    r = gl.arange(0, RANK, layout=gl.SliceLayout(0, copied))
    e = RANK + gl.arange(0, PE, layout=gl.SliceLayout(0, copied))
    each = gl.cdiv(gl.cdiv(n, TILE), gl.num_programs(1))
    first = part * each
    last = gl.minimum(first + each, gl.cdiv(n, TILE))

    latents = gl.allocate_shared_memory(BF16, [2, TILE, RANK], lies)
    shareds = gl.allocate_shared_memory(BF16, [2, TILE, PE], lies)
    at = _rows_of(table, chosen, first, j, n, PAGE, SPARSE)
    _ask(rows, at, r, e, latents.index(0), shareds.index(0), ROW)
    at = _rows_of(table, chosen, first + 1, j, n, PAGE, SPARSE)

    h = first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, copied))
    own = q + t * q_row + h[:, None] * ROW
    some = (h < H)[:, None]
    q_latent = gl.allocate_shared_memory(BF16, [HEADS, RANK], lies, gl.load(own + r[None, :], mask=some, other=0.0))
    q_shared = gl.allocate_shared_memory(BF16, [HEADS, PE], lies, gl.load(own + e[None, :], mask=some, other=0.0))
    if EXACT:
        low = gl.allocate_shared_memory(BF16, [HEADS, TILE], lies)

    column = gl.arange(0, TILE, layout=gl.SliceLayout(0, scored))
    top = gl.full((HEADS,), LOWEST, gl.float32, layout=gl.SliceLayout(1, scored))
    weight = gl.full((HEADS, TILE), 0.0, gl.float32, layout=scored)
    acc = gl.full((HEADS, RANK), 0.0, gl.float32, layout=mixed)
    nothing = gl.full((HEADS, TILE), 0.0, gl.float32, layout=scored)
    for tile in range(first, last):
        now = (tile - first) % 2
        latent = latents.index(now)
        shared = shareds.index(now)
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()  # this tile is there for all to read, and the other one's products are done: its place is free
        s = warpgroup_mma(q_shared, shared.permute((1, 0)), nothing, use_acc=False, is_async=True)
        s = warpgroup_mma(q_latent, latent.permute((1, 0)), s, is_async=True)
        _ask(rows, at, r, e, latents.index(1 - now), shareds.index(1 - now), ROW)
        at = _rows_of(table, chosen, tile + 2, j, n, PAGE, SPARSE)
        s = warpgroup_mma_wait(0, deps=(s,)) * scale
        s = gl.where((tile * TILE + column < n)[None, :], s, float("-inf"))
        higher = gl.maximum(top, gl.max(s, 1))
        keep = gl.exp2(top - higher)
        p = gl.exp2(s - higher[:, None])
        weight = weight * keep[:, None] + p
        top = higher
        high = p.to(BF16)
        shared.store(high)  # the scores are done with it, in both warpgroups since their maximum is known
        if EXACT:
            low.store((p - high.to(gl.float32)).to(BF16))
        acc = acc * gl.convert_layout(keep, gl.SliceLayout(1, mixed))[:, None]
        fence_async_shared()
        barrier()
        acc = warpgroup_mma(shared, latent, acc, is_async=True)
        if EXACT:
            acc = warpgroup_mma(low, latent, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
    async_copy.wait_group(0)

    total = gl.sum(weight, 1)
    _leave(o, tops, weights, acc, top, total, t, part, first_head, H, RANK, HEADS, SPLIT)

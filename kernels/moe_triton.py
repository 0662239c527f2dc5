"""Routed experts on a CUDA device: launches of the Triton kernels, with the signatures of `moe_batch`.

Launch shapes are a table by rows an expert has on average. What is bound by weight bytes takes 8 tokens a product,
which Triton 3.6 makes an mma: fewer registers than a wgmma takes and no waiting for it, so that more warps hide each
other's latencies. What is bound by arithmetic takes as many tokens as an expert is likely to have.
"""

import math
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels import moe_columns, mxfp4_triton
from forebay.kernels.moe import Experts, Packed
from forebay.kernels.moe_batch import ALL, Local, Norm
from forebay.kernels.moe_combine_triton import choose_kernel, combine_kernel
from forebay.kernels.moe_group_triton import arrange_kernel, count_kernel, group_kernel
from forebay.kernels.moe_products_triton import down_kernel, gate_up_kernel
from forebay.kernels.shapes import ModelShape

COUNT_BLOCK = 1024
GROUP_BLOCK = 4096
COUNTED_HERE_MAX = 4096  # entries up to which every program counts them all itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One size of tiles, `tokens` + `rest` entries (both 0 or a power of two, sizes of one call all below 16 or none),
    and its products' launches: weight rows a program takes at a time, warps, stages of the loads, blocks of 128 columns
    a step, programs a multiprocessor, registers a thread (None: as many as the compiler likes).
    """

    tokens: int
    rest: int = 0
    rows: int = 64
    warps: int = 4
    stages: int = 3
    blocks: int = 1
    programs: int = 4
    registers: int | None = None

    @property
    def entries(self) -> int:
        return self.tokens + self.rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Tile sizes, rising, for a mean of up to so many entries an expert; warps of the small kernels."""

    sizes: tuple[tuple[float, tuple[Size, ...]], ...]
    group_warps: int = 4
    choose_warps: int = 1
    combine_warps: int = 8

    def for_mean(self, entries: float) -> tuple[Size, ...]:
        return next((sizes for most, sizes in self.sizes if entries <= most), self.sizes[-1][1])


# Figures of one H200 with Triton 3.6: `bench_moe_variants`.
_ONE = (Size(tokens=8, warps=2, blocks=4, stages=2, programs=8),)
_FEW = (Size(tokens=8, blocks=2, programs=6, registers=80),)
_SEVERAL = (Size(tokens=8, warps=2, blocks=2, programs=8),)
_SOME = (Size(tokens=16, blocks=2), Size(tokens=32, blocks=2, programs=3))
_64 = Size(tokens=64, rows=128, warps=8, programs=2, registers=128)
_MANY = (_64, replace(_64, rest=16), replace(_64, rest=32))
TUNED = Tuning(sizes=((0.1, _ONE), (2.0, _FEW), (6.0, _SEVERAL), (24.0, _SOME), (float("inf"), _MANY)))


def _only(*sizes: Size) -> Tuning:
    return Tuning(sizes=((float("inf"), sizes),))


def _each(sizes: tuple[Size, ...], **changes: Any) -> Tuning:
    return _only(*(replace(size, **changes) for size in sizes))


_FEW_TRIED = MappingProxyType(
    {
        "16 tokens": _only(_SOME[0]),
        "16 and 32 tokens": _only(*_SOME),
        "1 block, 4 stages": _each(_FEW, blocks=1, stages=4),
        "4 blocks, 2 stages": _each(_FEW, blocks=4, stages=2),
        "4 stages": _each(_FEW, stages=4),
        "4 warps": _only(*_FEW),
        "4 warps, 5 programs": _each(_FEW, programs=5, registers=None),
        "2 warps": _only(*_SEVERAL),
        "2 warps, 4 blocks, 2 stages": _only(*_ONE),
        "32 rows": _each(_FEW, rows=32, warps=2, programs=12),
        "128 rows": _each(_FEW, rows=128, programs=4, registers=None),
    }
)
_MANY_TRIED = MappingProxyType(
    {
        "4 stages": _each(_MANY, stages=4),
        "1 program": _each(_MANY, programs=1, registers=None),
        "256 rows, 8 warps": _each(_MANY, rows=256, programs=1, registers=None),
        "256 rows, 16 warps": _each(_MANY, rows=256, warps=16, programs=1),
        "64 and 96": _only(_MANY[0], _MANY[2]),
    }
)
VARIANTS = MappingProxyType({1: _FEW_TRIED, 16: _FEW_TRIED, 64: _FEW_TRIED, 256: _FEW_TRIED, 4096: _MANY_TRIED})
"""What `forebay bench kernels` tries beside TUNED, by tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """What `group_kernel` leaves: order [N], tiles [sizes, 3, limit], counts [sizes]."""

    order: Tensor
    tiles: Tensor
    counts: Tensor

    @property
    def limit(self) -> int:
        return self.tiles.shape[2]


def fits(w: Experts) -> bool:
    """Whether the kernels take these weights: MXFP4, in whole blocks of columns."""
    parts = (w.w1, w.w2, w.w3)
    return all(isinstance(p, Packed) and p.packed.shape[2] * 2 % moe_columns.BLOCK == 0 for p in parts)


def route(
    x: Tensor, gate_w: Tensor, bias: Tensor, k: int, scaling: float, renormalize: bool, tuning: Tuning = TUNED
) -> tuple[Tensor, Tensor]:
    """`moe_batch.route`."""
    logits = F.linear(x.float(), gate_w.float())
    tokens, count = logits.shape
    chosen = torch.empty((tokens, k), dtype=torch.int32, device=x.device)
    weights = torch.empty((tokens, k), dtype=torch.float32, device=x.device)
    choose_kernel[(tokens,)](
        logits, bias, chosen, weights, scaling, logits.stride(0), count,
        PER_TOKEN=k, BINS=_power(count), RENORMALIZE=renormalize, num_warps=tuning.choose_warps,
    )  # fmt: skip
    return chosen, weights


def experts(
    z: Tensor,
    chosen: Tensor,
    weights: Tensor,
    w: Experts,
    shape: ModelShape,
    local: Local = ALL,
    norm: Norm | None = None,
    out: Tensor | None = None,
    tuning: Tuning = TUNED,
) -> Tensor:
    """`moe_batch.experts`."""
    w1, w3, w2 = (_packed(part) for part in (w.w1, w.w3, w.w2))
    count, width, half = w1.packed.shape
    tokens, k = chosen.shape
    sizes = tuning.for_mean(tokens * k / max(1, local.of or count))
    assert z.shape == (tokens, 2 * half)
    found = group(chosen, count, local.first, sizes, tuning)
    h = torch.empty((tokens * k, width), dtype=z.dtype, device=z.device)
    _gate_up(_arranged(z, sizes), w1, w3, found, k, h, shape, sizes)
    y = torch.empty((tokens * k, z.shape[1]), dtype=z.dtype, device=z.device)
    _down(h, w2, found, y, sizes)
    return combine(y, chosen, weights, local.first, count, norm, out, tuning)


def _packed(part: object) -> Packed:
    assert isinstance(part, Packed), "the kernels take MXFP4 weights"
    assert part.packed.is_contiguous()
    assert part.scale.is_contiguous()
    return part


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def low(dtype: torch.dtype) -> tl.dtype:
    """Type of the products; fp32 is for Triton's interpreter."""
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float32


def programs(device: torch.device, size: Size, tiles: int, slices: int) -> int:
    """At most as many programs as run at once; of those as few as need no more rounds, so that all have equal work."""
    work = tiles * slices
    most = 3
    if device.type == "cuda":
        most = size.programs * torch.cuda.get_device_properties(device).multi_processor_count
    return -(-work // -(-work // most))


def registers(size: Size) -> int | None:
    """The most that a thread may take: said to the compiler for which it was found; a later one needs more."""
    return size.registers if triton.__version__.startswith("3.6.") else None


def _blocks(size: Size, x: Tensor) -> int:
    """Blocks of columns a step: as many as the size says, or as divide the columns evenly."""
    return math.gcd(size.blocks, x.shape[1] // moe_columns.BLOCK)


def group(chosen: Tensor, count: int, first: int, sizes: tuple[Size, ...], tuning: Tuning) -> Tiles:
    entries, device = chosen.numel(), chosen.device
    assert chosen.is_contiguous()
    largest = sizes[-1].entries
    limit = -(-min(entries, entries // largest + count) // 4) * 4
    order = torch.empty(entries, dtype=torch.int32, device=device)
    tiles = torch.empty((len(sizes), 3, limit), dtype=torch.int32, device=device)
    counts = torch.empty(len(sizes), dtype=torch.int32, device=device)
    counted = entries > COUNTED_HERE_MAX
    held = torch.zeros(count + 1, dtype=torch.int32, device=device) if counted else counts
    if counted:
        count_kernel[(-(-entries // COUNT_BLOCK),)](chosen, held, entries, first, count, BLOCK=COUNT_BLOCK)
    group_kernel[(count,)](
        chosen, held, order, tiles, counts, entries, first, count, limit,
        SIZES=tuple(size.entries for size in sizes), BINS=_power(count + 1), BLOCK=min(GROUP_BLOCK, _power(entries)),
        COUNTED=counted, num_warps=tuning.group_warps,
    )  # fmt: skip
    return Tiles(order=order, tiles=tiles, counts=counts)


def _arranged(z: Tensor, sizes: tuple[Size, ...]) -> Tensor:
    """z's rows in the kernels' order of columns."""
    assert z.stride(1) == 1
    assert z.shape[1] % moe_columns.BLOCK == 0
    (side,) = {mxfp4_triton.side(size.tokens) for size in sizes}  # all sizes share h and so its order
    to = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    width = z.shape[1]
    arrange_kernel[(z.shape[0],)](z, to, z.stride(0), K=width, WIDTH=_power(width), SIDE=side, num_warps=8)
    return to


def _gate_up(
    z: Tensor, w1: Packed, w3: Packed, found: Tiles, k: int, h: Tensor, shape: ModelShape, sizes: tuple[Size, ...]
) -> None:
    for i, size in enumerate(sizes):
        grid = (programs(z.device, size, found.limit, 2 * h.shape[1] // size.rows),)
        gate_up_kernel[grid](
            z, w1.packed.view(torch.int16), w1.scale, w3.packed.view(torch.int16), w3.scale, found.order,
            found.tiles[i], found.counts[i:], h, shape.situ_beta, shape.situ_linear_beta, found.limit,
            PER_TOKEN=k, K=z.shape[1], N=h.shape[1], SITU=shape.activation == "situ", ROWS=size.rows, M=size.tokens,
            REST=size.rest, WARPS=size.warps, STAGES=size.stages, BLOCKS=_blocks(size, z), LOW=low(z.dtype),
            num_warps=size.warps, maxnreg=registers(size),
        )  # fmt: skip


def _down(h: Tensor, w2: Packed, found: Tiles, y: Tensor, sizes: tuple[Size, ...]) -> None:
    for i, size in enumerate(sizes):
        grid = (programs(h.device, size, found.limit, y.shape[1] // size.rows),)
        down_kernel[grid](
            h, w2.packed.view(torch.int16), w2.scale, found.order, found.tiles[i], found.counts[i:], y, found.limit,
            K=h.shape[1], N=y.shape[1], ROWS=size.rows, M=size.tokens, REST=size.rest, WARPS=size.warps,
            STAGES=size.stages, BLOCKS=_blocks(size, h), LOW=low(h.dtype),
            num_warps=size.warps, maxnreg=registers(size),
        )  # fmt: skip


def combine(
    y: Tensor,
    chosen: Tensor,
    weights: Tensor,
    first: int,
    count: int,
    norm: Norm | None,
    out: Tensor | None,
    tuning: Tuning,
) -> Tensor:
    tokens, k = chosen.shape
    width = y.shape[1]
    made = torch.empty((tokens, width), dtype=y.dtype, device=y.device) if out is None else out
    assert made.stride(1) == 1
    combine_kernel[(tokens,)](
        y, chosen, weights, weights if norm is None else norm.weight, made, 0.0 if norm is None else norm.eps,
        first, count, made.stride(0), PER_TOKEN=k, K=width, WIDTH=_power(width), NORM=norm is not None,
        num_warps=tuning.combine_warps,
    )  # fmt: skip
    return made

"""Routed experts with plain weights on a CUDA device: launches, with the signature of `moe_batch.experts`. Grouping and
the weighted sum are those of `moe_triton`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.kernels.moe import Dense, Experts
from forebay.kernels.moe_batch import ALL, Local, Norm
from forebay.kernels.moe_dense_products_triton import dense_down_kernel, dense_gate_up_kernel
from forebay.kernels.moe_triton import Size, Tiles, Tuning, combine, group, low, programs, route
from forebay.kernels.shapes import ModelShape

__all__ = ["DEPTH", "TUNED", "experts", "fits", "route"]

DEPTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A tile size's two products: `size` is the gate and up one's (its rows are of either), `down` the other's."""

    size: Size
    down: Size


def _launch(tokens: int, rows: int, warps: int, stages: int, programs: int, down: tuple[int, int, int, int]) -> Launch:
    return Launch(
        size=Size(tokens=tokens, rows=rows, warps=warps, stages=stages, programs=programs),
        down=Size(tokens=tokens, rows=down[0], warps=down[1], stages=down[2], programs=down[3]),
    )


_16 = _launch(16, 64, 4, 4, 2, (64, 4, 6, 3))
_32 = _launch(32, 64, 4, 4, 2, (64, 4, 5, 3))
_64 = _launch(64, 64, 4, 4, 2, (128, 4, 4, 2))
_128 = _launch(128, 128, 8, 4, 1, (128, 8, 4, 2))
TUNED: tuple[tuple[float, tuple[Launch, ...]], ...] = (
    (6.0, (_16,)),
    (24.0, (_16, _32)),
    (96.0, (_16, _32, _64)),
    (float("inf"), (_32, _64, _128)),
)
"""Launches by rising tile size, for a mean of up to so many entries an expert."""


def fits(w: Experts) -> bool:
    """Whether the kernels take these weights: plain, in whole slices and steps."""
    parts = (w.w1, w.w2, w.w3)
    return all(isinstance(p, Dense) and p.weight.shape[1] % 128 == p.weight.shape[2] % DEPTH == 0 for p in parts)


def experts(
    z: Tensor,
    chosen: Tensor,
    weights: Tensor,
    w: Experts,
    shape: ModelShape,
    local: Local = ALL,
    norm: Norm | None = None,
    out: Tensor | None = None,
    tuned: tuple[tuple[float, tuple[Launch, ...]], ...] = TUNED,
) -> Tensor:
    """`moe_batch.experts`."""
    w1, w3, w2 = (_plain(part) for part in (w.w1, w.w3, w.w2))
    count, width, inner = w1.shape
    tokens, k = chosen.shape
    assert z.shape == (tokens, inner)
    mean = tokens * k / max(1, local.of or count)
    launches = next(sizes for most, sizes in tuned if mean <= most)
    sizes = tuple(launch.size for launch in launches)
    found = group(chosen, count, local.first, sizes, Tuning(sizes=()))
    h = torch.empty((tokens * k, width), dtype=z.dtype, device=z.device)
    y = torch.empty((tokens * k, inner), dtype=z.dtype, device=z.device)
    for i, launch in enumerate(launches):
        _gate_up(z.contiguous(), w1, w3, found, i, k, h, shape, launch.size)
    for i, launch in enumerate(launches):
        _down(h, w2, found, i, y, launch.down)
    return combine(y, chosen, weights, local.first, count, norm, out, Tuning(sizes=()))


def _plain(part: object) -> Tensor:
    assert isinstance(part, Dense), "the kernels take plain weights"
    assert part.weight.is_contiguous()
    return part.weight


def _gate_up(
    z: Tensor, w1: Tensor, w3: Tensor, found: Tiles, i: int, k: int, h: Tensor, shape: ModelShape, size: Size
) -> None:
    dense_gate_up_kernel[(programs(z.device, size, found.limit, h.shape[1] // size.rows),)](
        z, w1, w3, found.order, found.tiles[i], found.counts[i:], h, shape.situ_beta, shape.situ_linear_beta,
        found.limit, PER_TOKEN=k, K=z.shape[1], N=h.shape[1], SITU=shape.activation == "situ", ROWS=size.rows,
        M=size.tokens, DEPTH=DEPTH, STAGES=size.stages, LOW=low(z.dtype), num_warps=size.warps,
    )  # fmt: skip


def _down(h: Tensor, w2: Tensor, found: Tiles, i: int, y: Tensor, size: Size) -> None:
    dense_down_kernel[(programs(h.device, size, found.limit, y.shape[1] // size.rows),)](
        h, w2, found.order, found.tiles[i], found.counts[i:], y, found.limit, K=h.shape[1], N=y.shape[1],
        ROWS=size.rows, M=size.tokens, DEPTH=DEPTH, STAGES=size.stages, LOW=low(h.dtype), num_warps=size.warps,
    )  # fmt: skip

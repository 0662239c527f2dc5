"""How a kernel's time is measured: replays of a CUDA graph between events, behind a flush of the L2 cache; medians."""

import time
from collections.abc import Callable
from statistics import median

import torch

FLUSH_BYTES = 256 << 20  # several times the L2 of any device at hand
WARM_UPS = 2


def median_ms(run: Callable[[], object], device: torch.device, repeats: int, graph: bool = True) -> float:
    """Median of `repeats` runs, in ms; `graph` False for code that cannot be captured. On a CPU by the wall clock."""
    for _ in range(WARM_UPS):
        run()
    if device.type != "cuda":
        return median(_wall_ms(run) for _ in range(repeats))
    again = _captured(run) if graph else run
    again()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    return median(_device_ms(again, flush) for _ in range(repeats))


def _captured(run: Callable[[], object]) -> Callable[[], object]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    replay: Callable[[], object] = graph.replay
    return replay


def _device_ms(run: Callable[[], object], flush: torch.Tensor) -> float:
    flush.zero_()
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    before.record()
    run()
    after.record()
    torch.cuda.synchronize()
    return float(before.elapsed_time(after))


def _wall_ms(run: Callable[[], object]) -> float:
    before = time.perf_counter()
    run()
    return (time.perf_counter() - before) * 1e3

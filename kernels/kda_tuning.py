"""Launch shapes of KDA's CUDA kernels: what measured best on an H200 (`kernels/bench_h200.json`)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Warps of each kernel, channels or columns that a program takes at a time, stages of the scan. `step_halves`: the
    state passes through registers in two halves of its columns. `_parts`, of a step or a replay: the kernels that take
    the state in so many parts of its columns, and ask early; 0: the others. `_registers`: a cap a thread.
    """

    fused_warps: int = 4
    fused_channels: int = 64
    solve_warps: int = 4
    scan_columns: int = 64
    scan_warps: int = 4
    scan_stages: int = 3
    reduce_columns: int = 64
    reduce_warps: int = 4
    step_warps: int = 4
    step_halves: bool = True
    step_parts: int = 0
    step_registers: int | None = None
    replay_parts: int = 0
    replay_registers: int | None = None
    replay_warps: int = 4


TUNED = Tuning()

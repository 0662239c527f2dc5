"""Launch shapes of KDA's CUDA kernels: what measured best on an H200 (`kernels/bench_h200.json`). What else is to be
measured: `bench_kda_variants`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Warps of each kernel, channels or columns that a program takes at a time, stages of the scan. `overlap`: the scan
    of a span runs on a stream of its own, beside the next span's chunks. `_parts`, of a step
    or a replay: the kernels that take the state in so many parts of its columns, and ask early; 0: the others.
    `_registers`: a cap a thread.
    """

    chunk_warps: int = 4
    chunk_channels: int = 32
    fused_warps: int = 8
    fused_channels: int = 128
    solve_warps: int = 4
    solve_registers: int | None = None
    scan_columns: int = 128
    scan_warps: int = 8
    scan_stages: int = 2
    reduce_columns: int = 64
    reduce_warps: int = 4
    overlap: bool = False
    step_warps: int = 4
    step_halves: bool = True
    step_parts: int = 0
    step_registers: int | None = None
    replay_parts: int = 0
    replay_registers: int | None = None
    replay_warps: int = 4


TUNED = Tuning()

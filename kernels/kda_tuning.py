"""Launch shapes of KDA's CUDA kernels: what measured best on an H200 (`kernels/bench_h200.json`)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Warps of each kernel, channels or columns that a program takes at a time, stages of the scan. `decode_parts` of
    its columns a state goes through registers in, `decode_registers`: a cap a thread.
    """

    fused_warps: int = 4
    fused_channels: int = 64
    solve_warps: int = 4
    scan_columns: int = 64
    scan_warps: int = 4
    scan_stages: int = 3
    reduce_columns: int = 64
    reduce_warps: int = 4
    decode_warps: int = 4
    decode_parts: int = 2
    decode_registers: int | None = 128


TUNED = Tuning()

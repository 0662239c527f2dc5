"""Compiles every CUDA kernel ahead of time for sm_90, at the shapes it is launched with for heads of 128, and prints
what each takes as JSON. A program of its own: Triton reads at import whether it is to compile or to interpret.
"""

import json

import triton
import triton.language as tl
from triton_measure import taken

from forebay.kernels import (
    kda_chunks_triton,
    kda_decode_triton,
    kda_fused_triton,
    kda_scan_triton,
    kda_solve_triton,
)
from forebay.kernels.kda_plan import CHUNK
from forebay.kernels.kda_prefill_triton import LEVELS
from forebay.kernels.kda_tuning import TUNED

LOW, MID, D, H = tl.bfloat16, tl.float16, 128, 96
INT_TABLES = (
    "chunk_start",
    "chunk_rows",
    "chunk_slot",
    "segment_first",
    "segment_final",
    "segment_goes_on",
    "sequence_segments",
    "page",
    "accepted",
)
FP32 = (
    "A_log", "dt_bias", "decay", "quarters", "state_in", "state_out", "kept", "transition", "from_zero", "segment_in",
    "states", "taps", "norm_weight", "scratch",
)  # fmt: skip
FP16 = ("strict", "sums")
SCALARS = {"lower": "fp32", "eps": "fp32"}

T = TUNED
SCAN = {
    "BV": T.scan_columns, "C": CHUNK, "SPANS": True, "LOW": LOW, "PRECISION": "tf32", "STAGES": T.scan_stages,
}  # fmt: skip
DECODE = {
    "T": T.decode_warps, "R": T.decode_warps * T.decode_parts, "PARTS": T.decode_parts, "BOUNDED": True, "CONV": True,
    "NORM": True,
}  # fmt: skip
LAUNCHES = {
    "fused": (
        kda_fused_triton.fused_chunk_kernel,
        T.fused_warps,
        {"DP": T.fused_channels, "C": CHUNK, "LEVELS": LEVELS, "LOW": LOW, "MID": MID, "FAST": True},
    ),
    "softplus": (
        kda_chunks_triton.chunk_kernel,
        4,
        {"DP": 32, "C": CHUNK, "B": kda_chunks_triton.BLOCK, "LOW": LOW, "PRECISION": "tf32"},
    ),
    "solve": (kda_solve_triton.solve_kernel, T.solve_warps, {"C": CHUNK, "LEVELS": LEVELS, "LOW": LOW, "MID": MID}),
    "scan": (kda_scan_triton.scan_kernel, T.scan_warps, {**SCAN, "FROM_ZERO": False, "CHECKPOINTS": True}),
    "reduce": (
        kda_scan_triton.reduce_kernel,
        T.reduce_warps,
        {"BV": T.reduce_columns, "C": CHUNK, "LOW": LOW, "PRECISION": "tf32", "STAGES": T.scan_stages},
    ),
    "compose": (kda_scan_triton.compose_kernel, 8, {"BV": 16, "FROM_ZERO": False, "PRECISION": "tf32x3"}),
    "step": (kda_decode_triton.decode_kernel, T.decode_warps, {**DECODE, "DRAFT": 0, "WINDOW": 1, "KEEP": True}),
    "replay": (kda_decode_triton.decode_kernel, T.decode_warps, {**DECODE, "DRAFT": 8, "WINDOW": 0, "KEEP": False}),
    "replay-and-window": (
        kda_decode_triton.decode_kernel,
        T.decode_warps,
        {**DECODE, "DRAFT": 8, "WINDOW": 1, "KEEP": False},
    ),
}  # fmt: skip


def kind(name: str) -> str:
    if name in SCALARS:
        return SCALARS[name]
    if name == "H" or name.endswith(("_stride", "_row")) or name in ("page_states", "page_tails"):
        return "i32"
    for group, pointer in ((INT_TABLES, "*i32"), (FP32, "*fp32"), (FP16, "*fp16")):
        if name in group:
            return pointer
    return "*bf16"


def compile_one(kernel: triton.JITFunction, warps: int, constants: dict[str, object]) -> dict[str, int]:
    return taken(kernel, warps, {**constants, "D": D}, kind)


if __name__ == "__main__":
    print(json.dumps({name: compile_one(*launch) for name, launch in LAUNCHES.items()}))

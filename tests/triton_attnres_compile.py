"""Compiles the kernels of attention residuals ahead of time for sm_90 at K3's width and prints what each takes as
JSON. A program of its own: Triton reads at import whether it is to compile or to interpret.
"""

import json

import triton.language as tl
from triton_measure import taken

from forebay.kernels.attnres_kernels_triton import merge_kernel, mix_kernel, score_kernel
from forebay.kernels.attnres_triton import COLUMNS, MIX_WARPS, ROWS, SCORE_WARPS, SHARE_MANY, STEP, WARPS
from forebay.kernels.models import K3

WIDE = {"D": K3.hidden, "WIDTH": 8192}
BANK = {"D": K3.hidden, "Q": 24, "QUERIES": 32, "LOW": tl.bfloat16}
LAUNCHES = {
    "score": (score_kernel, SCORE_WARPS, {**BANK, "ROWS": ROWS, "STEP": STEP, "SHARE": SHARE_MANY}),
    "mix": (mix_kernel, MIX_WARPS, {**BANK, "N": 8, "BLOCKS": 16, "COLUMNS": COLUMNS, "SHARES": 7}),
    "merge": (merge_kernel, WARPS, {**WIDE, "ADD": True}),
    "merge-without-output": (merge_kernel, WARPS, {**WIDE, "ADD": False}),
}


def kind(name: str) -> str:
    if name in ("eps", "norm_eps"):
        return "fp32"
    if name in ("T", "rows") or name.endswith("_stride"):
        return "i32"
    return "*fp32" if name in ("ws", "w", "top", "weight", "acc", "scores", "squares") else "*bf16"


if __name__ == "__main__":
    print(json.dumps({name: taken(*launch, kind) for name, launch in LAUNCHES.items()}))

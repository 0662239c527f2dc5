"""Compiles the kernels of attention residuals ahead of time for sm_90 at K3's width and prints what each takes as
JSON. A program of its own: Triton reads at import whether it is to compile or to interpret.
"""

import json

from triton_measure import taken

from forebay.kernels.attnres_kernels_triton import inter_kernel, merge_kernel
from forebay.kernels.attnres_triton import WARPS
from forebay.kernels.models import K3

WIDE = {"D": K3.hidden, "WIDTH": 8192}
LAUNCHES = {
    "inter": (inter_kernel, WARPS, WIDE),
    "merge": (merge_kernel, WARPS, {**WIDE, "ADD": True}),
    "merge-without-output": (merge_kernel, WARPS, {**WIDE, "ADD": False}),
}


def kind(name: str) -> str:
    if name in ("eps", "norm_eps"):
        return "fp32"
    if name in ("N", "T") or name.endswith("_stride"):
        return "i32"
    return "*fp32" if name in ("ws", "w", "top", "weight", "acc") else "*bf16"


if __name__ == "__main__":
    print(json.dumps({name: taken(*launch, kind) for name, launch in LAUNCHES.items()}))

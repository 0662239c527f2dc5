"""Compiles the kernels of routed experts ahead of time for sm_90, at K3's shapes and every launch of the tables, and
prints what each takes as JSON. A program of its own: Triton reads at import whether it is to compile or to interpret.
"""

import json

import triton
import triton.language as tl
from triton_measure import taken

from forebay.kernels import moe_combine_triton, moe_group_triton, moe_products_triton
from forebay.kernels.models import K3
from forebay.kernels.moe_triton import TUNED, Size

LATENT, WIDTH, EXPERTS, PER_TOKEN = 3584, K3.moe.width, K3.moe.experts, K3.moe.per_token
INT = ("order", "tiles", "count", "counts", "chosen", "tile_counts")
FP32 = ("weights", "logits", "bias")
SCALARS = {"beta": "fp32", "linear_beta": "fp32", "eps": "fp32", "scaling": "fp32"}
GROUP = {"BINS": 1024, "BLOCK": 1024}


def kind(name: str) -> str:
    if name in SCALARS:
        return SCALARS[name]
    if name.startswith("w") and name != "weights":
        return "*u8"
    if name in INT:
        return "*i32"
    if name in FP32:
        return "*fp32"
    return "i32" if name in ("N", "E", "first", "limit", "stride", "out_stride") else "*bf16"


def product(size: Size, **more: object) -> dict[str, object]:
    return {
        "ROWS": size.rows, "M": size.tokens, "REST": size.rest, "WARPS": size.warps, "STAGES": size.stages,
        "LOW": tl.bfloat16, **more,
    }  # fmt: skip


def gate_up(size: Size) -> tuple[triton.JITFunction, int, dict[str, object]]:
    constants = product(size, PER_TOKEN=PER_TOKEN, K=LATENT, N=WIDTH, SITU=True)
    return moe_products_triton.gate_up_kernel, size.warps, constants


def down(size: Size) -> tuple[triton.JITFunction, int, dict[str, object]]:
    return moe_products_triton.down_kernel, size.warps, product(size, K=WIDTH, N=LATENT)


def group(sizes: tuple[Size, ...], counted: bool) -> tuple[triton.JITFunction, int, dict[str, object]]:
    constants = {**GROUP, "SIZES": tuple(size.entries for size in sizes), "COUNTED": counted}
    return moe_group_triton.group_kernel, TUNED.group_warps, constants


FEW, SOME, MANY = (sizes for _, sizes in TUNED.sizes)
LAUNCHES = {
    "gate-up-few": gate_up(FEW[0]),
    "gate-up-some": gate_up(SOME[-1]),
    "gate-up-32": gate_up(MANY[0]),
    "gate-up-64": gate_up(MANY[1]),
    "gate-up-80": gate_up(MANY[2]),
    "gate-up-96": gate_up(MANY[3]),
    "gate-up-128": gate_up(MANY[4]),
    "down-few": down(FEW[0]),
    "down-some": down(SOME[-1]),
    "down-32": down(MANY[0]),
    "down-64": down(MANY[1]),
    "down-80": down(MANY[2]),
    "down-96": down(MANY[3]),
    "down-128": down(MANY[4]),
    "group-few": group(FEW, False),
    "group-many": group(MANY, True),
    "count": (moe_group_triton.count_kernel, 4, {"BLOCK": 1024}),
    "arrange": (moe_group_triton.arrange_kernel, 1, {"K": LATENT}),
    "choose": (
        moe_combine_triton.choose_kernel,
        TUNED.choose_warps,
        {"PER_TOKEN": PER_TOKEN, "BINS": 1024, "RENORMALIZE": True},
    ),
    "combine": (
        moe_combine_triton.combine_kernel,
        TUNED.combine_warps,
        {"PER_TOKEN": PER_TOKEN, "K": LATENT, "WIDTH": 4096, "NORM": True},
    ),
}

if __name__ == "__main__":
    print(json.dumps({name: taken(*launch, kind) for name, launch in LAUNCHES.items()}))

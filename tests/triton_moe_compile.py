"""Compiles the kernels of routed experts ahead of time for sm_90, at K3's shapes and every launch of the tables, and
prints what each takes as JSON. A program of its own: Triton reads at import whether it is to compile or to interpret.
"""

import json

import triton
import triton.language as tl
from triton_measure import taken

from forebay.kernels import moe_combine_triton, moe_group_triton, moe_products_triton
from forebay.kernels.models import K3
from forebay.kernels.moe_triton import TUNED, Size, registers

LATENT, WIDTH, EXPERTS, PER_TOKEN = 3584, K3.moe.width, K3.moe.experts, K3.moe.per_token
INT = ("order", "tiles", "count", "counts", "chosen", "tile_counts")
FP32 = ("weights", "logits", "bias")
SCALARS = {"beta": "fp32", "linear_beta": "fp32", "eps": "fp32", "scaling": "fp32"}
GROUP = {"BINS": 1024, "BLOCK": 4096}


def kind(name: str) -> str:
    if name in SCALARS:
        return SCALARS[name]
    if name.startswith("w") and name != "weights":
        return "*u8" if name.endswith("scale") else "*i16"
    if name in INT:
        return "*i32"
    if name in FP32:
        return "*fp32"
    return "i32" if name in ("N", "E", "first", "limit", "stride", "out_stride") else "*bf16"


def product(size: Size, **more: object) -> dict[str, object]:
    return {
        "ROWS": size.rows, "M": size.tokens, "REST": size.rest, "WARPS": size.warps, "STAGES": size.stages,
        "BLOCKS": size.blocks, "LOW": tl.bfloat16, **more,
    }  # fmt: skip


Launch = tuple[triton.JITFunction, int, dict[str, object], int | None]


def gate_up(size: Size) -> Launch:
    constants = product(size, PER_TOKEN=PER_TOKEN, K=LATENT, N=WIDTH, SITU=True)
    return moe_products_triton.gate_up_kernel, size.warps, constants, registers(size)


def down(size: Size) -> Launch:
    return moe_products_triton.down_kernel, size.warps, product(size, K=WIDTH, N=LATENT), registers(size)


def group(sizes: tuple[Size, ...], counted: bool) -> Launch:
    constants = {**GROUP, "SIZES": tuple(size.entries for size in sizes), "COUNTED": counted}
    return moe_group_triton.group_kernel, TUNED.group_warps, constants, None


ONE, FEW, SEVERAL, SOME, MANY = (sizes for _, sizes in TUNED.sizes)
LAUNCHES = {
    "gate-up-one": gate_up(ONE[0]),
    "gate-up-few": gate_up(FEW[0]),
    "gate-up-several": gate_up(SEVERAL[0]),
    "gate-up-16": gate_up(SOME[0]),
    "gate-up-32": gate_up(SOME[1]),
    "gate-up-64": gate_up(MANY[0]),
    "gate-up-80": gate_up(MANY[1]),
    "gate-up-96": gate_up(MANY[2]),
    "down-one": down(ONE[0]),
    "down-few": down(FEW[0]),
    "down-several": down(SEVERAL[0]),
    "down-16": down(SOME[0]),
    "down-32": down(SOME[1]),
    "down-64": down(MANY[0]),
    "down-80": down(MANY[1]),
    "down-96": down(MANY[2]),
    "group-few": group(FEW, False),
    "group-many": group(MANY, True),
    "count": (moe_group_triton.count_kernel, 4, {"BLOCK": 1024}, None),
    "arrange": (moe_group_triton.arrange_kernel, 8, {"K": LATENT, "WIDTH": 4096, "SIDE": 2}, None),
    "choose": (
        moe_combine_triton.choose_kernel,
        TUNED.choose_warps,
        {"PER_TOKEN": PER_TOKEN, "BINS": 1024, "RENORMALIZE": True},
        None,
    ),
    "combine": (
        moe_combine_triton.combine_kernel,
        TUNED.combine_warps,
        {"PER_TOKEN": PER_TOKEN, "K": LATENT, "WIDTH": 4096, "NORM": True},
        None,
    ),
}

if __name__ == "__main__":
    print(json.dumps({name: taken(*launch[:3], kind, launch[3]) for name, launch in LAUNCHES.items()}))

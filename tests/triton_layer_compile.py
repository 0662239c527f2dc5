"""Compiles the engine's own kernels ahead of time for sm_90, at Kimi Linear's shapes, of launches the smallest and the
largest, and prints what each takes as JSON. A program of its own: Triton reads at import whether to compile.
"""

import json

import triton
import triton.language as tl
from triton_measure import taken

from forebay.kernels import exact_triton, layer_kernels_triton, layer_triton, moe_dense_products_triton
from forebay.kernels.models import KIMI_LINEAR_48B
from forebay.kernels.moe_dense_triton import DEPTH, TUNED

SHAPE = KIMI_LINEAR_48B
HIDDEN, WIDTH, KDA = SHAPE.hidden, SHAPE.moe.width, SHAPE.kda
LAUNCHED = {launch.size.tokens: launch for _, launches in TUNED for launch in launches}
INTEGERS = ("T", "C", "N", "H", "W", "M", "P", "K", "EACH", "limit")


def kind(name: str) -> str:
    if name in ("eps", "beta", "linear_beta"):
        return "fp32"
    if name in ("order", "tiles", "count", "positions", "table"):
        return "*i32"
    if name in INTEGERS or name.endswith(("_row", "_batch", "_column")):
        return "i32"
    return "*bf16"


def gate_up(tokens: int) -> tuple[triton.JITFunction, int, dict[str, object]]:
    size = LAUNCHED[tokens].size
    constants = {
        "PER_TOKEN": SHAPE.moe.per_token,
        "K": HIDDEN,
        "N": WIDTH,
        "SITU": False,
        "ROWS": size.rows,
        "M": tokens,
    }
    more = {"DEPTH": DEPTH, "STAGES": size.stages, "LOW": tl.bfloat16}
    return moe_dense_products_triton.dense_gate_up_kernel, size.warps, {**constants, **more}


def down(tokens: int) -> tuple[triton.JITFunction, int, dict[str, object]]:
    size = LAUNCHED[tokens].down
    constants = {"K": WIDTH, "N": HIDDEN, "ROWS": size.rows, "M": tokens, "DEPTH": DEPTH, "STAGES": size.stages}
    return moe_dense_products_triton.dense_down_kernel, size.warps, {**constants, "LOW": tl.bfloat16}


LAUNCHES = {
    "gate-up-16": gate_up(16),
    "gate-up-128": gate_up(128),
    "down-16": down(16),
    "down-128": down(128),
    "add-norm": (layer_kernels_triton.add_norm_kernel, 8, {"D": HIDDEN, "WIDTH": 4096, "ADDED": 2}),
    "conv": (
        layer_kernels_triton.conv_kernel,
        4,
        {"LAGS": 3, "BLOCK": layer_triton.CONV_TOKENS, "CHANNELS": layer_triton.CONV_CHANNELS},
    ),
    "product": (
        exact_triton.product_kernel,
        exact_triton.WARPS,
        {"ROWS": exact_triton.ROWS, "COLUMNS": exact_triton.COLUMNS, "DEPTH": exact_triton.DEPTH, "LOW": tl.float32},
    ),
}

if __name__ == "__main__":
    print(json.dumps({name: taken(*launch, kind) for name, launch in LAUNCHES.items()}))

"""Compiles the attention kernels ahead of time for sm_90, at K3.1's shapes, as they are launched or, with LARGE in the
environment, in other ways that the bench tries, and prints what each takes as JSON. A program of its own: Triton reads
at import whether it is to compile or to interpret.
"""

import json
import os
from dataclasses import replace

import triton
import triton.language as tl
from triton_measure import taken

from forebay.kernels import (
    dsa_keys_triton,
    dsa_scores_triton,
    dsa_triton,
    mla_latent_triton,
    mla_prefill_triton,
    mla_triton,
    topk_triton,
)
from forebay.kernels.dsa_batch import GROUP
from forebay.kernels.models import K3_1_PRO

M, INDEX = K3_1_PRO.mla, K3_1_PRO.index
assert INDEX is not None
PAGE, KEY_PAGE = 1024, 8704  # tokens of a rank of eight
INT = (
    "table", "chosen", "lengths", "positions", "places", "found", "idx", "slots", "counts",
)  # fmt: skip
FP32 = ("tops", "weights", "parts", "carried", "scores", "values", "out", "scales")
SCALARS = {"scale": "fp32", "factor": "fp32"}
COUNTS = ("PER", "H", "T", "S", "N", "K", "SLACK", "seen", "piece")
LOW = tl.bfloat16
A, D = mla_triton.TUNED, dsa_triton.TUNED
Launch = tuple[triton.JITFunction, int, dict[str, object]]


def kind(name: str) -> str:
    if name in SCALARS:
        return SCALARS[name]
    if name in COUNTS or name.endswith(("_row", "_bytes")):
        return "i32"
    if name in INT:
        return "*i32"
    return "*fp32" if name in FP32 else "*bf16"


def fp8(name: str) -> str:
    """Of the indexer's kernels after quantization."""
    return "*fp8e4nv" if name in ("q", "codes") else kind(name)


def writing(name: str) -> str:
    """Of the kernels that quantize."""
    return "*fp8e4nv" if name == "codes" else kind(name)


def partial(name: str) -> str:
    """Of a kernel that leaves parts."""
    return "*fp32" if name == "o" else kind(name)


def latent(tuning: mla_triton.Tuning, few: bool, sparse: bool) -> Launch:
    tile, stages, warps = (
        (tuning.few_tile, tuning.few_stages, tuning.few_warps) if few else (tuning.tile, tuning.stages, tuning.warps)
    )
    constants = {
        "RANK": M.kv_rank, "PE": M.pe_dim, "HEADS": 16 if few else 64, "TILE": tile, "PAGE": PAGE, "SPARSE": sparse,
        "SPLIT": True, "SPREAD": tuning.spread and not few, "LOW": LOW, "STAGES": stages,
    }  # fmt: skip
    return mla_latent_triton.latent_kernel, warps, constants


def merge(parts: int) -> Launch:
    rounded = triton.next_power_of_2(parts)
    constants = {"RANK": M.kv_rank, "PARTS": parts, "MAX": rounded, "COLUMNS": A.merge_columns}
    return mla_latent_triton.merge_kernel, A.merge_warps, constants


def prefill(tuning: mla_triton.Tuning, first: bool) -> Launch:
    constants = {
        "NOPE": M.nope_dim, "PE": M.pe_dim, "RANK": M.kv_rank, "V": M.value_dim, "QUERIES": tuning.prefill_queries,
        "TILE": tuning.prefill_tile, "FIRST": first, "LAST": not first, "LOW": LOW, "STAGES": tuning.prefill_stages,
    }  # fmt: skip
    return mla_prefill_triton.prefill_kernel, tuning.prefill_warps, constants


def scores(tuning: dsa_triton.Tuning, together: int) -> Launch:
    stages, warps = (
        (tuning.score_stages, tuning.score_warps) if together == 1 else (tuning.shared_stages, tuning.shared_warps)
    )
    constants = {
        "H": INDEX.heads, "D": INDEX.head_dim, "QUERIES": together, "TILE": tuning.score_tile, "PAGE": KEY_PAGE,
        "GROUP": GROUP, "STAGES": stages,
    }  # fmt: skip
    return dsa_scores_triton.scores_kernel, warps, constants


def top_k(tuning: dsa_triton.Tuning, second: bool, first: bool) -> Launch:
    """The one launch of a row, or the first or second of a row in pieces."""
    constants = {
        "W": tuning.width or 2 * INDEX.top_k, "PLACES": second, "VALUES": first, "PAGE": 0 if first else PAGE,
        "STAGES": tuning.top_k_stages,
    }  # fmt: skip
    return topk_triton.top_k_kernel, tuning.top_k_warps, constants


LAUNCHES = {
    "latent-96-heads": (*latent(A, False, False), partial),
    "latent-12-heads": (*latent(A, True, False), partial),
    "slots-96-heads": (*latent(A, False, True), partial),
    "slots-12-heads": (*latent(A, True, True), partial),
    "merge": (*merge(mla_triton.PARTS_MAX), kind),
    "prefill-first": (*prefill(A, True), kind),
    "prefill-last": (*prefill(A, False), kind),
    "scores-decode": (*scores(D, 1), fp8),
    "scores-prefill": (*scores(D, D.shared_queries), fp8),
    "top-k": (*top_k(D, False, False), kind),
    "top-k-of-pieces": (*top_k(D, False, True), kind),
    "top-k-of-choices": (*top_k(D, True, False), kind),
    "keys-written": (
        dsa_keys_triton.write_keys_kernel, 4,
        {"D": INDEX.head_dim, "BLOCK": dsa_triton.ROWS, "PAGE": KEY_PAGE, "GROUP": GROUP}, writing,
    ),
    "queries-quantized": (
        dsa_keys_triton.quantize_queries_kernel, 4, {"D": INDEX.head_dim, "BLOCK": dsa_triton.ROWS}, writing,
    ),
}  # fmt: skip
VARIANTS = {
    "slots-96-heads-stages-5": (*latent(replace(A, stages=5), False, True), partial),
    "slots-12-heads-8-warps": (*latent(replace(A, few_tile=64, few_stages=3, few_warps=8), True, True), partial),
    "prefill-tile-128": (*prefill(replace(A, prefill_tile=128, prefill_stages=2), False), kind),
    "prefill-queries-64": (*prefill(replace(A, prefill_queries=64, prefill_warps=4), False), kind),
    "scores-decode-tile-64": (*scores(replace(D, score_tile=64), 1), fp8),
    "scores-decode-tile-256": (*scores(replace(D, score_tile=256, score_warps=8), 1), fp8),
    "top-k-8-warps": (*top_k(replace(D, top_k_warps=8), False, False), kind),
}

if __name__ == "__main__":
    launches = VARIANTS if "LARGE" in os.environ else LAUNCHES
    print(json.dumps({name: taken(*launch) for name, launch in launches.items()}))

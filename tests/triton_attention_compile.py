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
    mla_latent_gluon,
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
    "table", "chosen", "lengths", "positions", "maxima", "found", "listed", "bounds", "idx", "slots", "counts",
)  # fmt: skip
FP32 = ("tops", "weights", "parts", "carried", "scores", "values", "out", "scales")
SCALARS = {"scale": "fp32", "factor": "fp32"}
COUNTS = ("PER", "H", "T", "S", "N", "K", "SLACK", "seen", "piece", "groups")
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


def latent(tuning: mla_triton.Tuning, sparse: bool) -> Launch:
    constants = {
        "RANK": M.kv_rank, "PE": M.pe_dim, "HEADS": mla_triton.FEW_HEADS, "TILE": tuning.tile, "PAGE": PAGE,
        "SPARSE": sparse, "SPLIT": True, "LOW": LOW, "STAGES": tuning.stages,
    }  # fmt: skip
    return mla_latent_triton.latent_kernel, tuning.warps, constants


def by_hand(sparse: bool, split: bool, exact: bool = A.exact) -> Launch:
    side = mla_latent_gluon.SIDE
    constants = {
        "RANK": M.kv_rank, "PE": M.pe_dim, "HEADS": side, "TILE": side, "PAGE": PAGE, "SPARSE": sparse, "SPLIT": split,
        "EXACT": exact,
    }  # fmt: skip
    return mla_latent_gluon.latent_kernel, mla_latent_gluon.WARPS, constants


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
        "GROUP": GROUP, "HALF": tuning.score_half, "STAGES": stages,
    }  # fmt: skip
    return dsa_scores_triton.scores_kernel, warps, constants


def listing(tuning: dsa_triton.Tuning, listing: bool) -> Launch:
    """The launches over a row's pieces, of 65536 scores in blocks."""
    groups = 2 * INDEX.top_k * tuning.block // 65536
    if listing:
        return topk_triton.list_kernel, tuning.list_warps, {"BLOCK": tuning.block, "W": 2 * INDEX.top_k}
    return topk_triton.maxima_kernel, tuning.list_warps, {"BLOCK": tuning.block, "GROUPS": groups}


def choose(tuning: dsa_triton.Tuning, pieces: int) -> Launch:
    constants = {"PIECES": pieces, "W": 2 * INDEX.top_k, "PAGE": PAGE}
    return topk_triton.choose_kernel, tuning.choose_warps, constants


LAUNCHES = {
    "latent-96-heads": (*by_hand(False, False), kind),
    "latent-12-heads": (*latent(A, False), partial),
    "slots-96-heads-parts": (*by_hand(True, True), partial),
    "slots-12-heads": (*latent(A, True), partial),
    "merge": (*merge(mla_triton.PARTS_MAX), kind),
    "prefill-first": (*prefill(A, True), kind),
    "prefill-last": (*prefill(A, False), kind),
    "scores-decode": (*scores(D, 1), fp8),
    "scores-prefill": (*scores(D, D.shared_queries), fp8),
    "top-k-maxima": (*listing(D, False), kind),
    "top-k-list": (*listing(D, True), kind),
    "top-k-choose": (*choose(D, 16), kind),
    "keys-written": (
        dsa_keys_triton.write_keys_kernel, 4,
        {"D": INDEX.head_dim, "BLOCK": dsa_triton.ROWS, "PAGE": KEY_PAGE, "GROUP": GROUP}, writing,
    ),
    "queries-quantized": (
        dsa_keys_triton.quantize_queries_kernel, 4, {"D": INDEX.head_dim, "BLOCK": dsa_triton.ROWS}, writing,
    ),
}  # fmt: skip
VARIANTS = {
    "slots-96-heads": (*by_hand(True, False), kind),
    "slots-96-heads-rounded-once": (*by_hand(True, True, False), partial),
    "slots-12-heads-8-warps": (*latent(replace(A, tile=64, stages=3, warps=8), True), partial),
    "prefill-tile-128": (*prefill(replace(A, prefill_tile=128, prefill_stages=2), False), kind),
    "prefill-queries-64": (*prefill(replace(A, prefill_queries=64, prefill_warps=4), False), kind),
    "scores-decode-fp8": (*scores(replace(D, score_half=False), 1), fp8),
    "scores-decode-tile-64": (*scores(replace(D, score_tile=64), 1), fp8),
    "scores-decode-tile-256": (*scores(replace(D, score_tile=256, score_warps=8), 1), fp8),
    "top-k-choose-16-warps": (*choose(replace(D, choose_warps=16), 32), kind),
}

if __name__ == "__main__":
    launches = VARIANTS if "LARGE" in os.environ else LAUNCHES
    print(json.dumps({name: taken(*launch) for name, launch in launches.items()}))

"""Launch shapes of the attention kernels against each other: each checked against what is tuned, then timed, and the
fastest named. From these figures `mla_triton.TUNED` and `dsa_triton.TUNED` are chosen.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from triton.errors import TritonError

from forebay.kernels import bench_attention_inputs as inputs
from forebay.kernels import dsa_triton, mla_triton
from forebay.kernels.bench_attention import CONTEXT
from forebay.kernels.bench_attention_inputs import Sizes
from forebay.kernels.bench_inputs import relative
from forebay.kernels.bench_timing import median_ms
from forebay.ops.bench_report import Reference, Row

DIFFERENCE_MAX = 3e-3  # between launch shapes: bf16 products in other tiles
SCORES_DIFFERENCE_MAX = 5e-4  # sums of fp8 products, of which the tensor cores keep 14 bits

A, D = mla_triton.TUNED, dsa_triton.TUNED
ATTENTION = {
    "weights rounded once": replace(A, exact=False),
    "merge 128 columns": replace(A, merge_columns=128),
    "merge 256 columns, 2 warps": replace(A, merge_columns=256, merge_warps=2),
}
ATTENTION_FEW = {
    "stages 7": replace(A, stages=7),
    "tile 64": replace(A, tile=64, stages=3),
    "tile 64, 8 warps": replace(A, tile=64, stages=3, warps=8),
    "tile 64, stages 5, 8 warps": replace(A, tile=64, stages=5, warps=8),
    "merge 128 columns": replace(A, merge_columns=128),
}
PARTS = (1, 2, 4, 8, 16, 32, 64)
SCORES = {
    "fp8": replace(D, score_half=False),
    "fp8, 16 programs": replace(D, score_half=False, score_programs=16),
    "stages 4": replace(D, score_stages=4),
    "tile 64": replace(D, score_tile=64),
    "tile 256, 8 warps": replace(D, score_tile=256, score_warps=8),
    "8 warps": replace(D, score_warps=8),
    "2 programs": replace(D, score_programs=2),
    "8 programs": replace(D, score_programs=8),
    "16 programs": replace(D, score_programs=16),
}
TOP_K = {
    "8 warps": replace(D, list_warps=8),
    "16 warps choose": replace(D, choose_warps=16),
    "blocks of 8192, 8 warps": replace(D, block=8192, list_warps=8),
    "256 programs": replace(D, programs=256),
    "1024 programs": replace(D, programs=1024),
}
PREFILL = {
    "tile 128": replace(A, prefill_tile=128, prefill_stages=2),
    "stages 2": replace(A, prefill_stages=2),
    "64 queries, 4 warps": replace(A, prefill_queries=64, prefill_warps=4),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """One operator on one set of inputs in every way; `tolerance` 0 where all must give the same."""

    name: str
    run: Callable[[object], Tensor]
    tuned: object
    variants: dict[str, object]
    tolerance: float = DIFFERENCE_MAX


def rows(device: torch.device, repeats: int) -> Iterator[Row]:
    """Nothing on a CPU: launch shapes mean nothing there."""
    if device.type != "cuda":
        return
    for make in _races(device):
        yield from _raced(make(), device, repeats)


def _races(device: torch.device) -> Iterator[Callable[[], Race]]:
    whole, eighth = inputs.released(device), inputs.released(device, 8)
    for batch in (1, 16, 64):
        yield lambda batch=batch: _sparse(whole, batch, ATTENTION)  # type: ignore[misc]
        yield lambda batch=batch: _scores(whole, batch)  # type: ignore[misc]
        yield lambda batch=batch: _top_k(whole, batch)  # type: ignore[misc]
    for batch in (1, 32):
        yield lambda batch=batch: _sparse(eighth, batch, ATTENTION_FEW)  # type: ignore[misc]
    yield lambda: _prefill(whole, 2048, 6144)


def _raced(race: Race, device: torch.device, repeats: int) -> Iterator[Row]:
    right = race.run(race.tuned)
    best, best_ms, tuned_ms = "as tuned", float("inf"), 0.0
    for name, tuning in {"as tuned": race.tuned, **race.variants}.items():
        try:
            error = relative(race.run(tuning), right)
            ms = median_ms(lambda: race.run(tuning), device, repeats)  # noqa: B023
        except (TritonError, RuntimeError) as problem:
            yield Row(name=f"{race.name}, {name}: does not run, {str(problem)[:80]}", value=0.0, unit="failed")
            continue
        if not error <= race.tolerance:
            yield Row(name=f"{race.name}, {name}: wrong", value=error, unit="relative")
            continue
        tuned_ms = tuned_ms or ms
        yield Row(
            name=f"{race.name}, {name}", value=ms, unit="ms", reference=Reference(name="as tuned", value=tuned_ms)
        )
        if ms < best_ms:
            best, best_ms = name, ms
    yield Row(name=f"{race.name}: best, {best}", value=best_ms, unit="ms")


def _sparse(sizes: Sizes, batch: int, variants: dict[str, mla_triton.Tuning]) -> Race:
    pages, q = inputs.rows(sizes, batch, CONTEXT), inputs.absorbed(sizes, batch)
    of = inputs.chosen(sizes, pages, batch, CONTEXT)
    parts = {f"{n} parts": replace(A, parts=n) for n in PARTS if n * batch <= 512}

    def run(tuning: object) -> Tensor:
        assert isinstance(tuning, mla_triton.Tuning)
        return mla_triton.attend_slots(q, pages, of.slots, of.counts, sizes.scale, sizes.mla.kv_rank, tuning)

    name = f"sparse attention B {batch} H {sizes.mla.heads}"
    return Race(name=name, run=run, tuned=A, variants={**variants, **parts})


def _scores(sizes: Sizes, batch: int) -> Race:
    pages, (codes, weights) = inputs.keys(sizes, batch, CONTEXT), inputs.index_queries(sizes, batch)
    seen = inputs.lengths(sizes, batch, CONTEXT)

    def run(tuning: object) -> Tensor:
        assert isinstance(tuning, dsa_triton.Tuning)
        return dsa_triton.scores(codes, weights, pages, seen, CONTEXT, tuning)

    return Race(name=f"index scores B {batch}", run=run, tuned=D, variants={**SCORES}, tolerance=SCORES_DIFFERENCE_MAX)


def _top_k(sizes: Sizes, queries: int) -> Race:
    pages, values = inputs.rows(sizes, 1, CONTEXT), inputs.row_values(sizes, queries, CONTEXT)
    seen = inputs.lengths(sizes, queries, CONTEXT)

    def run(tuning: object) -> Tensor:
        assert isinstance(tuning, dsa_triton.Tuning)
        return dsa_triton.top_k(values, seen, sizes.index.top_k, pages, tuning).positions

    return Race(name=f"top-k rows {queries}", run=run, tuned=D, variants={**TOP_K}, tolerance=0.0)


def _prefill(sizes: Sizes, tokens: int, start: int) -> Race:
    m = sizes.mla
    pages = inputs.rows(sizes, 1, start + tokens)
    q = torch.randn(tokens, m.heads, m.query_dim, dtype=sizes.dtype, device=sizes.device)
    w_uk = torch.randn(m.heads, m.nope_dim, m.kv_rank, dtype=sizes.dtype, device=sizes.device) * m.kv_rank**-0.5
    w_uv = torch.randn(m.heads, m.kv_rank, m.value_dim, dtype=sizes.dtype, device=sizes.device) * m.kv_rank**-0.5

    def run(tuning: object) -> Tensor:
        assert isinstance(tuning, mla_triton.Tuning)
        return mla_triton.prefill(q, pages, w_uk, w_uv, start, tuning)

    return Race(name=f"prefill attention T {tokens} behind {start}", run=run, tuned=A, variants={**PREFILL})

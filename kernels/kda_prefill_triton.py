"""KDA prefill on a CUDA device: launches of the chunks' kernels, of the scan, and of the segments' passes."""

from dataclasses import dataclass
from functools import cache

import torch
import triton.language as tl
from torch import Tensor

from forebay.kernels.kda_batch import Layer, Prefilled
from forebay.kernels.kda_chunks_triton import BLOCK, chunk_kernel
from forebay.kernels.kda_fused_triton import fused_chunk_kernel, sum_matrices
from forebay.kernels.kda_plan import CHUNK, Plan, Span
from forebay.kernels.kda_scan_triton import compose_kernel, reduce_kernel, scan_kernel
from forebay.kernels.kda_solve_triton import solve_kernel
from forebay.kernels.kda_tuning import TUNED, Tuning

LEVELS = CHUNK.bit_length() - 1
DECAY_EXPONENT_MAX = 80.0  # e^80 leaves fp32 and bf16 room for what it multiplies


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What the chunks' kernels hand on: made [chunks, H, 4, C, D], which is w, q_decay, u and k_end; pairs [chunks, H,
    C, C]; decay [chunks, H, D].
    """

    made: Tensor
    pairs: Tensor
    decay: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    z: Tensor
    beta: Tensor


def _kinds(dtype: torch.dtype) -> dict[str, object]:
    """Types of the products: bf16 stays bf16, its inverse in fp16 (three bits finer); anything else in fp32."""
    if dtype == torch.bfloat16:
        return {"LOW": tl.bfloat16, "MID": tl.float16, "PRECISION": "tf32"}
    return {"LOW": tl.float32, "MID": tl.float32, "PRECISION": "ieee"}


def _mid(dtype: torch.dtype) -> torch.dtype:
    return torch.float16 if dtype == torch.bfloat16 else torch.float32


@cache
def _sums(dtype: torch.dtype, device: torch.device) -> Tensor:
    return sum_matrices(CHUNK, dtype, device)


@cache
def _scan_stream(device: torch.device) -> torch.cuda.Stream:
    """Its programs go first: they are the longest chain."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


def _rows(x: Tensor) -> Tensor:
    """[T, H, D] whose rows may lie apart but are whole."""
    assert x.stride()[-2:] == (x.shape[-1], 1), "heads lie side by side in a row"
    return x


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta: Tensor,
    layer: Layer,
    plan: Plan,
    state: Tensor | None,
    tuning: Tuning = TUNED,
) -> Prefilled:
    """`kda_batch.prefill`. A bounded gate's chunks go through one kernel, softplus's through two."""
    H, D = layer.heads, layer.head_dim
    assert q.shape == (plan.tokens, H, D)
    assert beta.shape == (plan.tokens, H)
    given = _Inputs(q=_rows(q), k=_rows(k), v=_rows(v), z=_rows(z), beta=beta)
    made = _room(given, layer, plan)
    if len(plan.spans) > 1 and q.is_cuda:
        _overlapped(given, layer, plan, state, made, tuning)
        return made
    parts = _scratch(given, layer, plan.spans[0].chunks)
    for span in plan.spans:
        _chunks(given, layer, plan, span, parts, tuning)
        before = _segment_states(parts, layer, plan, state, tuning) if plan.segmented else state
        _scan(parts, layer, plan, span, before, made, tuning)
    return made


def _room(given: _Inputs, layer: Layer, plan: Plan) -> Prefilled:
    H, D, v = layer.heads, layer.head_dim, given.v
    return Prefilled(
        o=torch.empty((plan.tokens, H, D), dtype=v.dtype, device=v.device),
        state=torch.empty((len(plan.lengths), H, D, D), dtype=torch.float32, device=v.device),
        checkpoints=torch.empty((plan.checkpoints, H, D, D), dtype=torch.float32, device=v.device),
    )


def _overlapped(
    given: _Inputs, layer: Layer, plan: Plan, state: Tensor | None, made: Prefilled, tuning: Tuning
) -> None:
    """Chunks on the current stream, scans on another; two sets of scratch take turns."""
    here, there = torch.cuda.current_stream(given.q.device), _scan_stream(given.q.device)
    turns = [_scratch(given, layer, plan.spans[0].chunks) for _ in range(2)]
    scanned: list[torch.cuda.Event] = []
    for n, span in enumerate(plan.spans):
        parts = turns[n % 2]
        if n >= 2:
            here.wait_event(scanned[n - 2])
        _chunks(given, layer, plan, span, parts, tuning)
        there.wait_event(here.record_event())
        with torch.cuda.stream(there):
            _scan(parts, layer, plan, span, state, made, tuning)
        scanned.append(there.record_event())
    here.wait_event(scanned[-1])


def _scratch(given: _Inputs, layer: Layer, chunks: int) -> _Parts:
    shape, device, dtype = (chunks, layer.heads), given.q.device, given.q.dtype
    return _Parts(
        made=torch.empty((*shape, 4, CHUNK, layer.head_dim), dtype=dtype, device=device),
        pairs=torch.empty((*shape, CHUNK, CHUNK), dtype=dtype, device=device),
        decay=torch.empty((*shape, layer.head_dim), dtype=torch.float32, device=device),
    )


def _chunks(given: _Inputs, layer: Layer, plan: Plan, span: Span, parts: _Parts, tuning: Tuning) -> None:
    """Fill `parts` for the chunks of a span."""
    tables = plan.chunk_start[span.first :], plan.chunk_rows[span.first :]
    if layer.gate == "bounded":
        assert -layer.lower_bound * CHUNK / 2 <= DECAY_EXPONENT_MAX, "half of what is referred to one sum fits"
        _chunks_at_once(given, layer, span, tables, parts, tuning)
    else:
        _chunks_then_solve(given, layer, span, tables, parts, tuning)


def _chunks_at_once(
    given: _Inputs, layer: Layer, span: Span, tables: tuple[Tensor, Tensor], parts: _Parts, tuning: Tuning
) -> None:
    H, D = layer.heads, layer.head_dim
    q, k, v, z, beta = given.q, given.k, given.v, given.z, given.beta
    kinds = _kinds(q.dtype)
    fused_chunk_kernel[(H, span.chunks)](
        q, k, v, z, beta, layer.A_log, layer.dt_bias, _sums(_mid(q.dtype), q.device), *tables, parts.made, parts.pairs,
        parts.decay, layer.lower_bound, q.stride(0), k.stride(0), v.stride(0), z.stride(0), beta.stride(0), H,
        D=D, DP=min(tuning.fused_channels, D), C=CHUNK, LEVELS=LEVELS, LOW=kinds["LOW"], MID=kinds["MID"],
        FAST=q.is_cuda, num_warps=tuning.fused_warps,
    )  # fmt: skip


def _chunks_then_solve(
    given: _Inputs, layer: Layer, span: Span, tables: tuple[Tensor, Tensor], parts: _Parts, tuning: Tuning
) -> None:
    H, D = layer.heads, layer.head_dim
    q, k, v, z, beta = given.q, given.k, given.v, given.z, given.beta
    kinds = _kinds(q.dtype)
    strict = torch.empty(parts.pairs.shape, dtype=_mid(q.dtype), device=q.device)
    chunk_kernel[(H, span.chunks)](
        q, k, z, beta, layer.A_log, layer.dt_bias, *tables, parts.made, parts.pairs, strict, parts.decay,
        q.stride(0), k.stride(0), z.stride(0), beta.stride(0), H, D=D, DP=min(32, D), C=CHUNK,
        B=BLOCK, LOW=kinds["LOW"], PRECISION=kinds["PRECISION"], num_warps=4,
    )  # fmt: skip
    solve_kernel[(H, span.chunks)](
        v, beta, strict, *tables, parts.made, v.stride(0), beta.stride(0), H, D=D, C=CHUNK, LEVELS=LEVELS,
        LOW=kinds["LOW"], MID=kinds["MID"], num_warps=tuning.solve_warps,
    )  # fmt: skip


def _scan(
    parts: _Parts, layer: Layer, plan: Plan, span: Span, before: Tensor | None, made: Prefilled, tuning: Tuning
) -> None:
    """Outputs and states of a span's segments; `before` is theirs [segments, ..] or, of a plan without, the
    sequences'.
    """
    H, D = layer.heads, layer.head_dim
    BV = min(tuning.scan_columns, D)
    kinds = _kinds(made.o.dtype)
    tables = (plan.chunk_start, plan.chunk_rows, plan.chunk_slot)
    scan_kernel[(D // BV, H, span.segments)](
        parts.made, parts.pairs, parts.decay, *(table[span.first :] for table in tables),
        span.segment_first, span.segment_final, span.segment_goes_on, before if before is not None else made.state,
        made.state, made.checkpoints, made.o, made.o.stride(0), H, D=D, BV=BV, C=CHUNK,
        FROM_ZERO=before is None, CHECKPOINTS=plan.checkpoints > 0, SPANS=len(plan.spans) > 1,
        LOW=kinds["LOW"], PRECISION=kinds["PRECISION"], STAGES=tuning.scan_stages, num_warps=tuning.scan_warps,
    )  # fmt: skip


def _segment_states(parts: _Parts, layer: Layer, plan: Plan, state: Tensor | None, tuning: Tuning) -> Tensor:
    """The state before each segment, [segments, H, D, D]."""
    H, D, dtype = layer.heads, layer.head_dim, parts.made.dtype
    transition, from_zero, before = (
        torch.empty((plan.segments, H, D, D), dtype=torch.float32, device=parts.made.device) for _ in range(3)
    )
    BV = min(tuning.reduce_columns, D)
    kinds = _kinds(dtype)
    reduce_kernel[(2 * D // BV, H, plan.segments)](
        parts.made, parts.decay, plan.segment_first, transition, from_zero, H, D=D, BV=BV, C=CHUNK,
        LOW=kinds["LOW"], PRECISION=kinds["PRECISION"], STAGES=tuning.scan_stages, num_warps=tuning.reduce_warps,
    )  # fmt: skip
    columns = min(16, D)
    compose_kernel[(D // columns, H, len(plan.lengths))](
        transition, from_zero, plan.sequence_segments, state if state is not None else before, before, H,
        D=D, BV=columns, FROM_ZERO=state is None, PRECISION="ieee" if dtype == torch.float32 else "tf32x3",
        num_warps=8,
    )  # fmt: skip
    return before

"""KDA on a CUDA device: launches of the Triton kernels, with the signatures of `kda_batch`.

Launch shapes are those that measured best on an H200 (`kernels/bench_h200.json`).
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton.language as tl
from torch import Tensor

from forebay.kernels.kda_batch import Layer, Prefilled, Tokens
from forebay.kernels.kda_bounded_triton import HALF, QUARTER, bounded_chunk_kernel, quarter_kernel, sign_matrix
from forebay.kernels.kda_chunks_triton import BLOCK, chunk_kernel
from forebay.kernels.kda_plan import CHUNK, Plan
from forebay.kernels.kda_scan_triton import compose_kernel, reduce_kernel, scan_kernel
from forebay.kernels.kda_solve_triton import solve_kernel
from forebay.kernels.kda_steps_triton import CONV_WIDTH, replay_kernel, step_kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Launch shapes: warps of each kernel, channels or columns that a program takes at a time, stages of the scan."""

    chunk_warps: int = 4
    chunk_channels: int = 32
    solve_warps: int = 4
    scan_columns: int = 128
    scan_warps: int = 8
    scan_stages: int = 2
    reduce_columns: int = 64
    reduce_warps: int = 4
    step_warps: int = 4
    step_halves: bool = True
    replay_warps: int = 4


TUNED = Tuning()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What `chunk_kernel` hands on, all [chunks, H, ..]."""

    w: Tensor
    u: Tensor
    q_decay: Tensor
    k_end: Tensor
    pairs: Tensor
    decay: Tensor


def _kinds(dtype: torch.dtype) -> dict[str, object]:
    """Types of the products: bf16 stays bf16, its inverse in fp16 (three bits finer); anything else in fp32."""
    if dtype == torch.bfloat16:
        return {"LOW": tl.bfloat16, "MID": tl.float16, "PRECISION": "tf32"}
    return {"LOW": tl.float32, "MID": tl.float32, "PRECISION": "ieee"}


@cache
def _signs(dtype: torch.dtype, device: torch.device) -> Tensor:
    return sign_matrix(CHUNK, dtype, device)


def _check_layout(layer: Layer, states: Tensor, tails: Tensor) -> None:
    assert layer.taps.shape[0] == CONV_WIDTH
    assert layer.taps.is_contiguous()
    assert states[0].is_contiguous(), "a page holds its state in one piece"
    assert tails[0].is_contiguous(), "a page holds its tail in one piece"


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
    """`kda_batch.prefill`."""
    H, D = layer.heads, layer.head_dim
    assert q.shape == (plan.tokens, H, D)
    assert beta.shape == (plan.tokens, H)
    parts = _chunks(q, k, v, z, beta, layer, plan, tuning)
    if plan.segmented:
        state = _segment_states(parts, layer, plan, state, q.dtype, tuning)
    o = torch.empty((plan.tokens, H, D), dtype=v.dtype, device=v.device)
    after = torch.empty((len(plan.lengths), H, D, D), dtype=torch.float32, device=v.device)
    kept = torch.empty((plan.checkpoints, H, D, D), dtype=torch.float32, device=v.device)
    BV = min(tuning.scan_columns, D)
    kinds = _kinds(q.dtype)
    scan_kernel[(D // BV, H, plan.segments)](
        parts.w, parts.u, parts.q_decay, parts.k_end, parts.pairs, parts.decay, plan.chunk_start, plan.chunk_rows,
        plan.chunk_slot, plan.segment_first, plan.segment_final, state if state is not None else after, after, kept, o,
        o.stride(0), H, D=D, BV=BV, C=CHUNK, FROM_ZERO=state is None, CHECKPOINTS=plan.checkpoints > 0,
        LOW=kinds["LOW"], PRECISION=kinds["PRECISION"], STAGES=tuning.scan_stages, num_warps=tuning.scan_warps,
    )  # fmt: skip
    return Prefilled(o=o, state=after, checkpoints=kept)


def _chunks(
    q: Tensor, k: Tensor, v: Tensor, z: Tensor, beta: Tensor, layer: Layer, plan: Plan, tuning: Tuning
) -> _Parts:
    H, D = layer.heads, layer.head_dim

    def tile(columns: int) -> Tensor:
        return torch.empty((plan.chunks, H, CHUNK, columns), dtype=q.dtype, device=q.device)

    decay = torch.empty((plan.chunks, H, D), dtype=torch.float32, device=q.device)
    made = _Parts(w=tile(D), u=tile(D), q_decay=tile(D), k_end=tile(D), pairs=tile(CHUNK), decay=decay)
    kinds = _kinds(q.dtype)
    mid = torch.float16 if q.dtype == torch.bfloat16 else torch.float32
    strict = torch.empty((plan.chunks, H, CHUNK, CHUNK), dtype=mid, device=q.device)
    inputs = (_rows(q), _rows(k), _rows(z), beta, layer.A_log, layer.dt_bias)
    tables = (plan.chunk_start, plan.chunk_rows)
    outputs = (made.w, made.q_decay, made.k_end, made.pairs, strict)
    strides = (q.stride(0), k.stride(0), z.stride(0), beta.stride(0), H)
    if layer.gate == "bounded":
        assert -layer.lower_bound * QUARTER <= 80.0, "a quarter chunk of decay stays within fp32"
        quarters = torch.empty((plan.chunks, H, CHUNK // QUARTER, D), dtype=torch.float32, device=q.device)
        quarter_kernel[(H, plan.chunks)](
            z, layer.A_log, layer.dt_bias, *tables, quarters, decay, layer.lower_bound, z.stride(0), H,
            D=D, C=CHUNK, QUARTER=QUARTER, MID=kinds["MID"], FAST=q.is_cuda, num_warps=1,
        )  # fmt: skip
        bounded_chunk_kernel[(H, plan.chunks)](
            *inputs, _signs(mid, q.device), quarters, *tables, *outputs, layer.lower_bound, *strides,
            D=D, DP=min(tuning.chunk_channels, D), C=CHUNK, HALF=HALF, LOW=kinds["LOW"], MID=kinds["MID"],
            FAST=q.is_cuda, num_warps=tuning.chunk_warps,
        )  # fmt: skip
    else:
        chunk_kernel[(H, plan.chunks)](
            *inputs, *tables, *outputs, decay, *strides,
            D=D, DP=min(32, D), C=CHUNK, B=BLOCK, LOW=kinds["LOW"], PRECISION=kinds["PRECISION"], num_warps=8,
        )  # fmt: skip
    solve_kernel[(H, plan.chunks)](
        _rows(v), beta, strict, *tables, made.w, made.u, v.stride(0), beta.stride(0), H,
        D=D, C=CHUNK, LEVELS=CHUNK.bit_length() - 1, LOW=kinds["LOW"], MID=kinds["MID"], num_warps=tuning.solve_warps,
    )  # fmt: skip
    return made


def _segment_states(
    parts: _Parts, layer: Layer, plan: Plan, state: Tensor | None, dtype: torch.dtype, tuning: Tuning
) -> Tensor:
    """The state before each segment, [segments, H, D, D]."""
    H, D = layer.heads, layer.head_dim
    transition, from_zero, before = (
        torch.empty((plan.segments, H, D, D), dtype=torch.float32, device=parts.w.device) for _ in range(3)
    )
    BV = min(tuning.reduce_columns, D)
    kinds = _kinds(dtype)
    reduce_kernel[(2 * D // BV, H, plan.segments)](
        parts.w, parts.u, parts.k_end, parts.decay, plan.segment_first, transition, from_zero, H,
        D=D, BV=BV, C=CHUNK, LOW=kinds["LOW"], PRECISION=kinds["PRECISION"], STAGES=tuning.scan_stages,
        num_warps=tuning.reduce_warps,
    )  # fmt: skip
    columns = min(16, D)
    compose_kernel[(D // columns, H, len(plan.lengths))](
        transition, from_zero, plan.sequence_segments, state if state is not None else before, before, H,
        D=D, BV=columns, FROM_ZERO=state is None, PRECISION="ieee" if dtype == torch.float32 else "tf32x3",
        num_warps=8,
    )  # fmt: skip
    return before


def step(tokens: Tokens, layer: Layer, states: Tensor, tails: Tensor, page: Tensor, tuning: Tuning = TUNED) -> Tensor:
    """`kda_batch.step`."""
    return _step(tokens, layer, states, tails, page, True, True, tuning)


def recurrence(
    tokens: Tokens, layer: Layer, states: Tensor, tails: Tensor, page: Tensor, tuning: Tuning = TUNED
) -> Tensor:
    """The step's middle alone: x is q|k|v after convolution and SiLU, o comes before norm and output gate; tails
    stay.
    """
    return _step(tokens, layer, states, tails, page, False, False, tuning)


def conv_recurrence(
    tokens: Tokens, layer: Layer, states: Tensor, tails: Tensor, page: Tensor, tuning: Tuning = TUNED
) -> Tensor:
    """The step without norm and output gate."""
    return _step(tokens, layer, states, tails, page, True, False, tuning)


def _step(
    tokens: Tokens,
    layer: Layer,
    states: Tensor,
    tails: Tensor,
    page: Tensor,
    convolve: bool,
    norm: bool,
    tuning: Tuning,
) -> Tensor:
    H, D, B = layer.heads, layer.head_dim, page.shape[0]
    _check_layout(layer, states, tails)
    o = torch.empty((B, H * D), dtype=tokens.x.dtype, device=tokens.x.device)
    step_kernel[(H, B)](
        tokens.x, tokens.z, tokens.beta, tokens.gate, layer.taps, layer.A_log, layer.dt_bias, layer.norm_weight,
        states, tails, page, o, layer.lower_bound, layer.eps, tokens.x.stride(0), tokens.z.stride(0),
        tokens.beta.stride(0), tokens.gate.stride(0), o.stride(0), states.stride(0), tails.stride(0), H,
        D=D, HALVES=tuning.step_halves, BOUNDED=layer.gate == "bounded", CONV=convolve, NORM=norm,
        num_warps=tuning.step_warps,
    )  # fmt: skip
    return o


def replay(
    tokens: Tokens,
    drafted: int,
    accepted: Tensor,
    layer: Layer,
    states: Tensor,
    tails: Tensor,
    page: Tensor,
    tuning: Tuning = TUNED,
) -> Tensor:
    """`kda_batch.replay`, in one launch."""
    H, D, B = layer.heads, layer.head_dim, page.shape[0]
    window = tokens.x.shape[1] - drafted
    assert tails.dtype == tokens.x.dtype, "a tail holds inputs as they came"
    flat = [part.flatten(0, 1) for part in (tokens.x, tokens.z, tokens.beta, tokens.gate)]
    _check_layout(layer, states, tails)
    o = torch.empty((B, window, H * D), dtype=tokens.x.dtype, device=tokens.x.device)
    replay_kernel[(H, B)](
        *flat, layer.taps, layer.A_log, layer.dt_bias, layer.norm_weight, states, tails, page, accepted, o,
        layer.lower_bound, layer.eps, *(part.stride(0) for part in flat), H * D, states.stride(0), tails.stride(0), H,
        D=D, DRAFT=drafted, WINDOW=window, BOUNDED=layer.gate == "bounded", num_warps=tuning.replay_warps,
    )  # fmt: skip
    return o

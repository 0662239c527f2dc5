"""KDA on a CUDA device: launches of the Triton kernels, with the signatures of `kda_batch`."""

import torch
from torch import Tensor

from forebay.kernels.kda_batch import Layer, Tokens
from forebay.kernels.kda_prefill_triton import prefill
from forebay.kernels.kda_replay_triton import replay_kernel, replay_parts_kernel
from forebay.kernels.kda_step_early_triton import step_early_kernel
from forebay.kernels.kda_steps_triton import CONV_WIDTH, step_kernel
from forebay.kernels.kda_tuning import TUNED, Tuning

__all__ = ["TUNED", "Tuning", "conv_recurrence", "prefill", "recurrence", "replay", "step"]


def _check_layout(layer: Layer, states: Tensor, tails: Tensor) -> None:
    assert layer.taps.shape[0] == CONV_WIDTH
    assert layer.taps.is_contiguous()
    assert states[0].is_contiguous(), "a page holds its state in one piece"
    assert tails[0].is_contiguous(), "a page holds its tail in one piece"


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
    inputs = (tokens.x, tokens.z, tokens.beta, tokens.gate, layer.taps, layer.A_log, layer.dt_bias, layer.norm_weight)
    rows = (part.stride(0) for part in (tokens.x, tokens.z, tokens.beta, tokens.gate, o, states, tails))
    shape = {"D": D, "BOUNDED": layer.gate == "bounded", "CONV": convolve, "NORM": norm}
    launch = {"num_warps": tuning.step_warps, "maxnreg": tuning.step_registers}
    places = (states, tails, page, o, layer.lower_bound, layer.eps)
    if tuning.step_parts:
        parts = {"PARTS": tuning.step_parts, "AHEAD": tuning.step_parts > 2}
        step_early_kernel[(H, B)](*inputs, *places, *rows, H, **shape, **parts, **launch)
    else:
        step_kernel[(H, B)](*inputs, *places, *rows, H, **shape, HALVES=tuning.step_halves, **launch)
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
    inputs = (*flat, layer.taps, layer.A_log, layer.dt_bias, layer.norm_weight, states, tails, page, accepted)
    strides = (layer.lower_bound, layer.eps, *(part.stride(0) for part in flat), H * D)
    strides += (states.stride(0), tails.stride(0), H)
    shape = {"D": D, "DRAFT": drafted, "WINDOW": window, "BOUNDED": layer.gate == "bounded"}
    launch = {"num_warps": tuning.replay_warps, "maxnreg": tuning.replay_registers}
    if tuning.replay_parts:
        prepared = torch.empty((B, H, drafted, 3, D), dtype=torch.float32, device=o.device)
        replay_parts_kernel[(H, B)](*inputs, prepared, o, *strides, **shape, PARTS=tuning.replay_parts, **launch)
    else:
        replay_kernel[(H, B)](*inputs, o, *strides, **shape, **launch)
    return o

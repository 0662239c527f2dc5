"""KDA on a CUDA device: launches of the Triton kernels, with the signatures of `kda_batch`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.kernels.kda_batch import Layer, Tokens
from forebay.kernels.kda_decode_triton import CONV_WIDTH, TOKEN, decode_kernel
from forebay.kernels.kda_prefill_triton import prefill
from forebay.kernels.kda_tuning import TUNED, Tuning

__all__ = ["TUNED", "Tuning", "conv_recurrence", "prefill", "recurrence", "replay", "step"]


def _check_layout(layer: Layer, states: Tensor, tails: Tensor) -> None:
    assert layer.taps.shape[0] == CONV_WIDTH
    assert layer.taps.is_contiguous()
    assert states[0].is_contiguous(), "a page holds its state in one piece"
    assert tails[0].is_contiguous(), "a page holds its tail in one piece"


def step(tokens: Tokens, layer: Layer, states: Tensor, tails: Tensor, page: Tensor, tuning: Tuning = TUNED) -> Tensor:
    """`kda_batch.step`."""
    return _decode(tokens, _Form(keep=True), page, layer, states, tails, page, tuning)


def recurrence(
    tokens: Tokens, layer: Layer, states: Tensor, tails: Tensor, page: Tensor, tuning: Tuning = TUNED
) -> Tensor:
    """The step's middle alone: x is q|k|v after convolution and SiLU, o comes before norm and output gate; tails
    stay.
    """
    return _decode(tokens, _Form(keep=True, conv=False, norm=False), page, layer, states, tails, page, tuning)


def conv_recurrence(
    tokens: Tokens, layer: Layer, states: Tensor, tails: Tensor, page: Tensor, tuning: Tuning = TUNED
) -> Tensor:
    """The step without norm and output gate."""
    return _decode(tokens, _Form(keep=True, norm=False), page, layer, states, tails, page, tuning)


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
    flat = Tokens(
        x=tokens.x.flatten(0, 1), z=tokens.z.flatten(0, 1), beta=tokens.beta.flatten(0, 1),
        gate=tokens.gate.flatten(0, 1),
    )  # fmt: skip
    window = tokens.x.shape[1] - drafted
    o = _decode(flat, _Form(drafted=drafted, window=window), accepted, layer, states, tails, page, tuning)
    return o.view(page.shape[0], window, o.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """What a decode does with the tokens of a sequence: `drafted`, then `window`, which is kept or not."""

    drafted: int = 0
    window: int = 1
    keep: bool = False
    conv: bool = True
    norm: bool = True


def _decode(
    tokens: Tokens,
    form: _Form,
    accepted: Tensor,
    layer: Layer,
    states: Tensor,
    tails: Tensor,
    page: Tensor,
    tuning: Tuning,
) -> Tensor:
    """Tokens by rows, those of a sequence together; returns o [B * window, H D]."""
    H, D, B = layer.heads, layer.head_dim, page.shape[0]
    count = form.drafted + form.window
    _check_layout(layer, states, tails)
    assert not form.conv or tails.dtype == tokens.x.dtype, "a tail holds inputs as they came"
    o = torch.empty((B * form.window, H * D), dtype=tokens.x.dtype, device=tokens.x.device)
    scratch = torch.empty((B, H, count, TOKEN.value, D), dtype=torch.float32, device=o.device)
    given = (tokens.x, tokens.z, tokens.beta, tokens.gate)
    warps, parts = tuning.decode_warps, min(tuning.decode_parts, D // 8)
    decode_kernel[(H, B)](
        *given, layer.taps, layer.A_log, layer.dt_bias, layer.norm_weight, states, tails, page, accepted, scratch, o,
        layer.lower_bound, layer.eps, *(part.stride(0) for part in (*given, o, states, tails)), H,
        D=D, T=warps, R=min(128 * warps * parts // D, D), PARTS=parts, DRAFT=form.drafted, WINDOW=form.window,
        KEEP=form.keep, BOUNDED=layer.gate == "bounded", CONV=form.conv, NORM=form.norm,
        num_warps=warps, maxnreg=tuning.decode_registers,
    )  # fmt: skip
    return o

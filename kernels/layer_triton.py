"""A layer's small operators on a CUDA device: launches of the Triton kernels, with the signatures of `layer_batch`."""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from forebay.kernels.layer_kernels_triton import (
    add_norm_kernel,
    conv_kernel,
    gated_norm_kernel,
    glu_kernel,
    write_rows_kernel,
)
from forebay.kernels.mla_batch import Pages
from forebay.kernels.moe_combine_triton import choose_kernel
from forebay.kernels.shapes import ModelShape

GLU_BLOCK = 1024
CONV_TOKENS, CONV_CHANNELS = 32, 128
NORM_HEADS = 16


def add_norm(prefix: Tensor, outputs: Sequence[Tensor], weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`layer_batch.add_norm`."""
    tokens, dim = prefix.shape
    first, second = [*outputs, prefix, prefix][:2]
    assert prefix.stride(1) == first.stride(1) == second.stride(1) == 1
    normed = torch.empty((tokens, dim), dtype=prefix.dtype, device=prefix.device)
    grown = torch.empty_like(normed) if outputs else prefix
    add_norm_kernel[(tokens,)](
        prefix, first, second, weight, grown, normed, eps, prefix.stride(0), first.stride(0), second.stride(0),
        D=dim, WIDTH=triton.next_power_of_2(dim), ADDED=len(outputs), num_warps=8,
    )  # fmt: skip
    return grown, normed


def glu(gate: Tensor, up: Tensor, shape: ModelShape, out: Tensor | None = None) -> Tensor:
    """`layer_batch.glu`."""
    tokens, width = gate.shape
    to = torch.empty((tokens, width), dtype=gate.dtype, device=gate.device) if out is None else out
    assert gate.stride(1) == up.stride(1) == to.stride(1) == 1
    glu_kernel[(tokens, triton.cdiv(width, GLU_BLOCK))](
        gate, up, to, shape.situ_beta, shape.situ_linear_beta, gate.stride(0), up.stride(0), to.stride(0), width,
        BLOCK=GLU_BLOCK, SITU=shape.activation == "situ", num_warps=4,
    )  # fmt: skip
    return to


def write_rows(latent: Tensor, shared: Tensor, weight: Tensor, eps: float, positions: Tensor, pages: Pages) -> None:
    """`layer_batch.write_rows`."""
    tokens, rank = latent.shape
    pe = shared.shape[1]
    assert pages.pool.is_contiguous(), "rows lie one after another through the whole pool"
    write_rows_kernel[(tokens,)](
        latent, shared, weight, positions, pages.table, pages.pool, eps, latent.stride(0), shared.stride(0),
        pages.table.stride(0), pages.queries_each(tokens), RANK=rank, WIDTH=triton.next_power_of_2(rank), PE=pe,
        PE_WIDTH=triton.next_power_of_2(pe), PAGE=pages.page_tokens, num_warps=1,
    )  # fmt: skip


def short_conv(x: Tensor, taps: Tensor, tail: Tensor) -> Tensor:
    """`layer_batch.short_conv`."""
    tokens, channels = x.shape
    lags = len(tail)
    assert taps.is_contiguous()
    assert tail.is_contiguous()
    y = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    conv_kernel[(triton.cdiv(tokens, CONV_TOKENS), triton.cdiv(channels, CONV_CHANNELS))](
        x, taps, tail, y, tokens, channels, x.stride(0), LAGS=lags, BLOCK=CONV_TOKENS, CHANNELS=CONV_CHANNELS,
        num_warps=4,
    )  # fmt: skip
    if tokens >= lags:
        tail.copy_(x[tokens - lags :])
    else:
        tail.copy_(torch.cat((tail[tokens:], x.to(tail.dtype))))
    return y


def gated_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`layer_batch.gated_norm`."""
    tokens, heads, dim = o.shape
    assert o.stride()[1:] == (dim, 1), "heads lie side by side in a row"
    to = torch.empty((tokens, heads * dim), dtype=gate.dtype, device=o.device)
    gated_norm_kernel[(triton.cdiv(tokens * heads, NORM_HEADS),)](
        o, gate, weight, to, eps, tokens * heads, o.stride(0), gate.stride(0), heads, D=dim,
        WIDTH=triton.next_power_of_2(dim), BLOCK=NORM_HEADS, num_warps=4,
    )  # fmt: skip
    return to


def choose(logits: Tensor, bias: Tensor, k: int, scaling: float, renormalize: bool) -> tuple[Tensor, Tensor]:
    """`layer_batch.choose`."""
    tokens, count = logits.shape
    chosen = torch.empty((tokens, k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, k), dtype=torch.float32, device=logits.device)
    choose_kernel[(tokens,)](
        logits, bias, chosen, weights, scaling, logits.stride(0), count,
        PER_TOKEN=k, BINS=triton.next_power_of_2(count), RENORMALIZE=renormalize, num_warps=1,
    )  # fmt: skip
    return chosen, weights

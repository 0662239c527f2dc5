"""Attention residuals on a CUDA device: launches of the Triton kernels, with the signatures of `attnres_batch`."""

import torch
from torch import Tensor

from forebay.kernels.attnres import Partials
from forebay.kernels.attnres_kernels_triton import inter_kernel, merge_kernel

WARPS = 8


def inter(bank: Tensor, ws: Tensor, eps: float, warps: int = WARPS) -> Partials:
    """`attnres_batch.inter`."""
    blocks, tokens, dim = bank.shape
    queries = len(ws)
    assert ws.dtype == torch.float32
    assert ws.is_contiguous()
    assert bank.stride(2) == 1
    top, weight = (torch.empty((queries, tokens, 1), dtype=torch.float32, device=bank.device) for _ in range(2))
    acc = torch.empty((queries, tokens, dim), dtype=torch.float32, device=bank.device)
    inter_kernel[(tokens, queries)](
        bank, ws, top, weight, acc, eps, blocks, tokens, bank.stride(0), bank.stride(1),
        D=dim, WIDTH=_power(dim), num_warps=warps,
    )  # fmt: skip
    return Partials(top, weight, acc)


def merge(
    partial: Partials,
    prefix: Tensor,
    output: Tensor | None,
    w: Tensor,
    eps: float,
    norm: Tensor,
    norm_eps: float,
    warps: int = WARPS,
) -> tuple[Tensor, Tensor]:
    """`attnres_batch.merge`, in one launch."""
    tokens, dim = prefix.shape
    added = prefix if output is None else output
    assert all(part.is_contiguous() for part in (*partial, w, norm))
    assert prefix.stride(1) == added.stride(1) == 1
    normed = torch.empty((tokens, dim), dtype=prefix.dtype, device=prefix.device)
    grown = prefix if output is None else torch.empty_like(normed)
    merge_kernel[(tokens,)](
        *partial, prefix, added, w, norm, grown, normed, eps, norm_eps, prefix.stride(0), added.stride(0),
        D=dim, WIDTH=_power(dim), ADD=output is not None, num_warps=warps,
    )  # fmt: skip
    return grown, normed


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()

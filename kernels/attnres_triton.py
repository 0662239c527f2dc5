"""Attention residuals on a CUDA device: launches of the Triton kernels, with the signatures of `attnres_batch`."""

import torch
import triton
from torch import Tensor

from forebay.kernels import attnres
from forebay.kernels.attnres import Partials
from forebay.kernels.attnres_kernels_triton import merge_kernel, mix_kernel, score_kernel
from forebay.kernels.mla_triton import low

WARPS = 8
ROWS, STEP, COLUMNS = 64, 128, 256  # of a program's: rows and columns scored, columns mixed
SHARE_FEW, SHARE_MANY, MANY = 256, 1024, 64
SCORE_WARPS, MIX_WARPS = 4, 4
TENSOR_CORE_ROWS = 16  # the least that a product takes


def inter(bank: Tensor, ws: Tensor, eps: float) -> Partials:
    """`attnres_batch.inter`: the bank is read once to be scored and once to be mixed, whatever the queries' number."""
    blocks, tokens, dim = bank.shape
    queries = len(ws)
    if blocks == 0:
        return attnres.inter(bank, ws, eps)
    assert ws.dtype == torch.float32
    assert ws.is_contiguous()
    assert bank.stride(2) == 1
    share = SHARE_FEW if tokens < MANY else SHARE_MANY
    shares = triton.cdiv(dim, share)
    scores = torch.empty((shares, blocks * tokens, queries), dtype=torch.float32, device=bank.device)
    squares = torch.empty((shares, blocks * tokens), dtype=torch.float32, device=bank.device)
    padded, kind = _power(max(queries, TENSOR_CORE_ROWS)), low(bank.dtype)
    score_kernel[(triton.cdiv(blocks * tokens, ROWS), shares)](
        bank, ws, scores, squares, tokens, blocks * tokens, bank.stride(0), bank.stride(1),
        D=dim, Q=queries, QUERIES=padded, ROWS=ROWS, STEP=STEP, SHARE=share, LOW=kind, num_warps=SCORE_WARPS,
    )  # fmt: skip
    top, weight = (torch.empty((queries, tokens, 1), dtype=torch.float32, device=bank.device) for _ in range(2))
    acc = torch.empty((queries, tokens, dim), dtype=torch.float32, device=bank.device)
    mix_kernel[(triton.cdiv(dim, COLUMNS), tokens)](
        bank, scores, squares, top, weight, acc, eps, tokens, bank.stride(0), bank.stride(1),
        D=dim, N=blocks, BLOCKS=_power(max(blocks, TENSOR_CORE_ROWS)), Q=queries, QUERIES=padded, COLUMNS=COLUMNS,
        SHARES=shares, LOW=kind, num_warps=MIX_WARPS,
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

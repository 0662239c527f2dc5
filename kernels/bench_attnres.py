"""Measurements of the attention residuals beside the floor: every input read and every output written once at the copy
rate of an H200. Checked against float64 first.
"""

from collections.abc import Iterator

import torch

from forebay.kernels import attnres, by_device, reference
from forebay.kernels.bench_inputs import relative
from forebay.kernels.bench_timing import median_ms
from forebay.kernels.models import K3
from forebay.ops.bench_report import Reference, Row

COPY_BYTES_PER_MS = 4.26e9
BLOCKS = 8
ERROR_MAX = 5e-3  # of bf16 outputs that were rounded twice


def rows(device: torch.device, repeats: int) -> Iterator[Row]:
    """Phase one for all pseudo-queries of a block of layers, and one merge with its add and norm."""
    assert K3.attn_res_block is not None
    on_gpu = device.type == "cuda"
    dim, queries = (K3.hidden, 2 * K3.attn_res_block) if on_gpu else (64, 4)
    for tokens in (1, 32, 1024) if on_gpu else (4,):
        yield from _rows(tokens, dim, queries, device, repeats)


def _rows(tokens: int, dim: int, queries: int, device: torch.device, repeats: int) -> Iterator[Row]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    eps, residual = K3.norm_eps, by_device.attnres(device)
    bank = torch.randn(BLOCKS, tokens, dim, device=device).to(dtype)
    prefix, output = (torch.randn(tokens, dim, device=device).to(dtype) for _ in range(2))
    ws, norm = torch.randn(queries, dim, device=device) * dim**-0.5, torch.rand(dim, device=device).to(dtype) + 0.5
    partials: attnres.Partials = residual.inter(bank, ws, eps)
    last = partials.query(queries - 1)
    grown, made = residual.merge(last, prefix, output, ws[-1], eps, norm, eps)
    mix = reference.mix(torch.cat((bank, grown[None])).double(), ws[-1].double(), eps)
    right = mix / (mix.square().mean(-1, keepdim=True) + eps).sqrt() * norm.double()
    error = relative(made, right)
    assert torch.equal(grown, prefix + output), "the prefix grows by the sublayer's output"
    assert error <= ERROR_MAX, f"residuals are wrong: {error}"
    yield Row(name=f"residuals error, T {tokens}", value=error, unit="relative")
    ms = median_ms(lambda: residual.inter(bank, ws, eps), device, repeats)
    moved = bank.nbytes + ws.nbytes + sum(part.nbytes for part in partials)
    yield Row(name=f"residuals inter, {BLOCKS} blocks, {queries} queries, T {tokens}", value=ms, unit="ms",
              reference=Reference(name="floor", value=moved / COPY_BYTES_PER_MS))  # fmt: skip
    ms = median_ms(lambda: residual.merge(last, prefix, output, ws[-1], eps, norm, eps), device, repeats)
    moved = sum(part.nbytes for part in last) + 4 * prefix.nbytes + ws[-1].nbytes + norm.nbytes
    yield Row(name=f"residuals merge, add and norm, T {tokens}", value=ms, unit="ms",
              reference=Reference(name="floor", value=moved / COPY_BYTES_PER_MS))  # fmt: skip

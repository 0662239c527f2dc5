"""Attention residuals: the bank's part of a softmax for many pseudo-queries at once, and the running prefix merged into
it together with the add before and the norm behind.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

import triton
import triton.language as tl


@triton.jit
def _score(v, w, eps, D: tl.constexpr):
    """RMSNorm(v) . w."""
    return tl.sum(v * w) * tl.rsqrt(tl.sum(v * v) / D + eps)


@triton.jit
def inter_kernel(bank, ws, top, weight, acc, eps, N, T, block_stride, row_stride, D: tl.constexpr, WIDTH: tl.constexpr):
    """Program (token, pseudo-query): online softmax over the bank's N blocks. top, weight [Q, T], acc [Q, T, D]."""
    t = tl.program_id(0).to(tl.int64)
    q = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, WIDTH)
    inside = d < D
    w = tl.load(ws + q * D + d, mask=inside, other=0.0)
    most = float("-inf")
    total = 0.0
    mixed = tl.zeros((WIDTH,), tl.float32)
    for n in range(N):
        at = bank + tl.cast(n, tl.int64) * block_stride + t * row_stride
        v = tl.load(at + d, mask=inside, other=0.0).to(tl.float32)
        score = _score(v, w, eps, D)
        higher = tl.maximum(most, score)
        keep = tl.exp(most - higher)
        own = tl.exp(score - higher)
        total = total * keep + own
        mixed = mixed * keep + v * own
        most = higher
    at = q * T + t
    tl.store(top + at, most)
    tl.store(weight + at, total)
    tl.store(acc + at * D + d, mixed, mask=inside)


@triton.jit
def merge_kernel(
    top, weight, acc, prefix, output, w, norm, grown, normed, eps, norm_eps, prefix_stride, output_stride,
    D: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Program t: prefix + output with ADD, its mix with the partials top, weight [T], acc [T, D], and that one's
    RMSNorm, each rounded where `attnres_batch.merge` rounds. grown (written with ADD) and normed [T, D].
    """
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH)
    inside = d < D
    kind = normed.dtype.element_ty
    v = tl.load(prefix + t * prefix_stride + d, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        v += tl.load(output + t * output_stride + d, mask=inside, other=0.0).to(tl.float32)
        v = v.to(kind).to(tl.float32)
        tl.store(grown + t * D + d, v.to(kind), mask=inside)
    score = _score(v, tl.load(w + d, mask=inside, other=0.0), eps, D)
    before = tl.load(top + t)
    higher = tl.maximum(before, score)
    keep = tl.exp(before - higher)
    own = tl.exp(score - higher)
    mixed = tl.load(acc + t * D + d, mask=inside, other=0.0) * keep + v * own
    mixed = (mixed / (tl.load(weight + t) * keep + own)).to(kind).to(tl.float32)
    scale = tl.rsqrt(tl.sum(mixed * mixed) / D + norm_eps)
    factor = tl.load(norm + d, mask=inside, other=0.0).to(kind).to(tl.float32)
    tl.store(normed + t * D + d, ((mixed * scale).to(kind).to(tl.float32) * factor).to(kind), mask=inside)

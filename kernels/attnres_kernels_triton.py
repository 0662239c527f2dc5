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
def _exact_dot(a, b, LOW: tl.constexpr, SPLIT: tl.constexpr):
    """a @ b with one factor in LOW and the other (a where SPLIT is 0, b where it is 1) in fp32: three parts of that one
    in bf16 hold all of its digits, and the tensor cores add in fp32.
    """
    if tl.float32 == LOW:
        made = tl.dot(a, b, input_precision="ieee")
    else:
        whole = a if SPLIT == 0 else b
        first = whole.to(LOW)
        rest = whole - first.to(tl.float32)
        second = rest.to(LOW)
        third = (rest - second.to(tl.float32)).to(LOW)
        if SPLIT == 0:
            made = tl.dot(first, b, acc=tl.dot(second, b, acc=tl.dot(third, b)))
        else:
            made = tl.dot(a, first, acc=tl.dot(a, second, acc=tl.dot(a, third)))
    return made


@triton.jit
def score_kernel(
    bank, ws, scores, squares, T, rows, block_stride, row_stride,
    D: tl.constexpr, Q: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    SHARE: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """Program (block of ROWS rows, share of SHARE columns): rows n T + t of the bank against the pseudo-queries ws [Q,
    D]. Leaves its share of v . w in scores [shares, rows, Q] and of v . v in squares [shares, rows].
    """
    share = tl.program_id(1)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    q = tl.arange(0, QUERIES)
    some = i < rows
    own = bank + (i // T).to(tl.int64) * block_stride + (i % T).to(tl.int64) * row_stride
    score = tl.zeros((ROWS, QUERIES), tl.float32)
    square = tl.zeros((ROWS,), tl.float32)
    for first in range(share * SHARE, (share + 1) * SHARE, STEP):
        d = first + tl.arange(0, STEP)
        v = tl.load(own[:, None] + d[None, :], mask=some[:, None] & (d < D)[None, :], other=0.0)
        w = tl.load(ws + q[None, :] * D + d[:, None], mask=(q < Q)[None, :] & (d < D)[:, None], other=0.0)
        score += _exact_dot(v.to(LOW), w, LOW, 1)
        square += tl.sum(v.to(tl.float32) * v.to(tl.float32), 1)
    at = share.to(tl.int64) * rows + i
    tl.store(scores + at[:, None] * Q + q[None, :], score, mask=some[:, None] & (q < Q)[None, :])
    tl.store(squares + at, square, mask=some)


@triton.jit
def mix_kernel(
    bank, scores, squares, top, weight, acc, eps, T, block_stride, row_stride,
    D: tl.constexpr, N: tl.constexpr, BLOCKS: tl.constexpr, Q: tl.constexpr, QUERIES: tl.constexpr,
    COLUMNS: tl.constexpr, SHARES: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """Program (block of columns, token): softmax over the bank's N blocks of what `score_kernel` left, for all
    pseudo-queries. top, weight [Q, T], acc [Q, T, D].
    """
    t = tl.program_id(1)
    n = tl.arange(0, BLOCKS)
    q = tl.arange(0, QUERIES)
    d = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = n < N
    some = q < Q
    score = tl.zeros((QUERIES, BLOCKS), tl.float32)
    square = tl.zeros((BLOCKS,), tl.float32)
    for share in tl.static_range(SHARES):
        row = (share * N + n) * T + t
        score += tl.load(scores + row[None, :] * Q + q[:, None], mask=there[None, :] & some[:, None], other=0.0)
        square += tl.load(squares + row, mask=there, other=0.0)
    score = tl.where(there[None, :], score * tl.rsqrt(square / D + eps)[None, :], float("-inf"))
    most = tl.max(score, 1)
    p = tl.exp(score - most[:, None])
    at = bank + n.to(tl.int64) * block_stride + tl.cast(t, tl.int64) * row_stride
    v = tl.load(at[:, None] + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0).to(LOW)
    own = q.to(tl.int64) * T + t
    tl.store(acc + own[:, None] * D + d[None, :], _exact_dot(p, v, LOW, 0), mask=some[:, None] & (d < D)[None, :])
    if tl.program_id(0) == 0:
        tl.store(top + own, most, mask=some)
        tl.store(weight + own, tl.sum(p, 1), mask=some)


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

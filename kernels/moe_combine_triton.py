"""Before and after the experts: which ones a token takes, and the weighted sum of what they gave."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

import triton
import triton.language as tl


@triton.jit
def choose_kernel(
    logits, bias, chosen, weights, scaling, stride, E,
    PER_TOKEN: tl.constexpr, BINS: tl.constexpr, RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """Program t: the PER_TOKEN experts of the largest sigmoid + bias, of equal ones the lowest, by rising id; and their
    sigmoids, divided by their sum with RENORMALIZE, times `scaling`. logits [T, E]. What is not a number loses.
    """
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BINS)
    here = e < E
    score = 1.0 / (1.0 + tl.exp(-tl.load(logits + t * stride + e, mask=here, other=0.0).to(tl.float32)))
    biased = score + tl.load(bias + e, mask=here, other=0.0).to(tl.float32)
    biased = tl.where(biased == biased, biased, float("-inf"))
    free = here
    for _ in range(PER_TOKEN):
        top = tl.max(tl.where(free, biased, float("-inf")))
        best = tl.min(tl.where(free & (biased == top), e, BINS))
        free = free & (e != best)
    taken = here & (free == 0)
    total = 1.0
    if RENORMALIZE:
        total = tl.sum(tl.where(taken, score, 0.0)) + 1e-20
    to = t * PER_TOKEN + tl.cumsum(taken.to(tl.int32)) - 1
    tl.store(chosen + to, e, mask=taken)
    tl.store(weights + to, score / total * scaling, mask=taken)


@triton.jit
def combine_kernel(
    y, chosen, weights, norm, out, eps, first, E, out_stride,
    PER_TOKEN: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Program t: sum_j weights[t, j] y[t, j] over the experts that are here, by rising choice, fp32; with NORM, rounded
    and normalised as `norms.rms_norm` does. y [T * PER_TOKEN, K].
    """
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH)
    inside = d < K
    total = tl.zeros((WIDTH,), tl.float32)
    for j in tl.static_range(PER_TOKEN):
        at = t * PER_TOKEN + j
        e = tl.load(chosen + at).to(tl.int32) - first
        here = (e >= 0) & (e < E)
        part = tl.load(y + at * K + d, mask=d < tl.where(here, K, 0), other=0.0).to(tl.float32)
        total += part * tl.load(weights + at)
    kind = out.dtype.element_ty
    if NORM:
        rounded = total.to(kind).to(tl.float32)
        scale = tl.rsqrt(tl.sum(rounded * rounded) / K + eps)
        weight = tl.load(norm + d, mask=inside, other=0.0).to(kind).to(tl.float32)
        total = (rounded * scale).to(kind).to(tl.float32) * weight
    tl.store(out + t * out_stride + d, total.to(kind), mask=inside)

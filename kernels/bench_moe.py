"""Measurements of the routed experts beside the floor and the figures published, checked against their slow twin first.

The floor is the weights of every expert that is used, read once at the copy rate of an H200, or the products at its
bf16 rate, the larger. Routing is uniform and random, as the published figures have it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from forebay.kernels import by_device, costs, moe, moe_batch, reference
from forebay.kernels.bench_inputs import relative
from forebay.kernels.bench_timing import median_ms
from forebay.kernels.models import K3
from forebay.kernels.moe import Experts, Packed
from forebay.kernels.shapes import ModelShape
from forebay.ops.bench_report import Reference, Row

COPY_BYTES_PER_MS, FLOP_PER_MS, FP32_FLOP_PER_MS = 4.26e9, 7.9e11, 6.0e10
ERROR_MAX = 5.1e-3  # Marlin's, published, against float64
CHECKED_TOKENS = (1, 16, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`published`: the best public figure on an H200."""

    tokens: int
    published: Reference


def _case(tokens: int, name: str, ms: float) -> Case:
    return Case(tokens=tokens, published=Reference(name=f"{name}, published", value=ms))


CASES = (
    _case(1, "Marlin", 0.135),
    _case(16, "triton_kernels", 1.46),
    _case(64, "triton_kernels", 3.82),
    _case(256, "triton_kernels", 5.68),
    _case(4096, "triton_kernels", 13.3),
)
SMALL = MappingProxyType({"experts": 16, "latent": 256, "width": 128, "per_token": 4, "tokens": 8})


def rows(device: torch.device, repeats: int) -> Iterator[Row]:
    """Every measurement that this device can make. On a CPU one of a small layer, which shows that it works."""
    if device.type != "cuda":
        w = random_experts(SMALL["experts"], SMALL["latent"], SMALL["width"], device)
        yield from _row(SMALL["tokens"], SMALL["per_token"], w, K3, torch.float32, repeats, None)
        return
    m, latent = K3.moe, K3.moe.latent
    assert latent is not None
    w = random_experts(m.experts, latent, m.width, device)
    yield from check_against_gold(w, m.per_token, K3)
    yield from check_skewed(w, m.per_token, K3)
    for case in CASES:
        yield from _row(case.tokens, m.per_token, w, K3, torch.bfloat16, repeats, case.published)
    yield from _route_rows(device, repeats)


def random_experts(count: int, latent: int, width: int, device: torch.device) -> Experts:
    """Any codes, and scales of four neighbouring powers of two such that sums stay near one."""

    def one(out: int, into: int) -> Packed:
        packed = torch.randint(0, 256, (count, out, into // 2), dtype=torch.uint8, device=device)
        scale = 118 + torch.randint(0, 4, (count, out, into // 32), dtype=torch.uint8, device=device)
        return Packed(packed, scale)

    return Experts(w1=one(width, latent), w3=one(width, latent), w2=one(latent, width))


def routing(tokens: int, experts: int, per_token: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Distinct experts of each token at random, rising, and weights that sum to one."""
    chosen = torch.rand(tokens, experts, device=device).topk(per_token, 1).indices.sort(1).values.int()
    share = torch.rand(tokens, per_token, device=device)
    return chosen, share / share.sum(1, keepdim=True)


def check_against_gold(w: Experts, per_token: int, shape: ModelShape) -> Iterator[Row]:
    """Errors against float64 on the same inputs, twice; a run that is wrong or wavers ends here."""
    device = _packed(w.w1).device
    count, latent = _packed(w.w1).shape[0], _packed(w.w2).shape[1]
    for tokens in CHECKED_TOKENS:
        chosen, share = routing(tokens, count, per_token, device)
        z = torch.randn(tokens, latent, device=device).bfloat16()
        made, again = (by_device.experts(z, chosen, share, w, shape) for _ in range(2))
        assert torch.equal(made, again), "the same inputs give the same bits"
        error = relative(made, gold(z, chosen, share, w, shape))
        assert error <= ERROR_MAX, f"experts are wrong at {tokens} tokens: {error}"
        public = Reference(name="Marlin, published", value=ERROR_MAX)
        yield Row(name=f"experts error, T {tokens}", value=error, unit="relative", reference=public)


def check_skewed(w: Experts, per_token: int, shape: ModelShape) -> Iterator[Row]:
    """Many tokens of the same few experts, which fill tiles of every size; against the twin in fp32."""
    from forebay.kernels import moe_triton  # where there is a GPU, triton is there too

    count, latent, device = _packed(w.w1).shape[0], _packed(w.w2).shape[1], _packed(w.w1).device
    entries = torch.tensor((300, 96, 80, 64, 40, 17, 9, 1), device=device)
    base = torch.repeat_interleave(torch.arange(len(entries), device=device), entries)
    chosen = (base[:, None] * per_token + torch.arange(per_token, device=device)).int()
    assert int(chosen.max()) < count
    z, share = torch.randn(len(base), latent, device=device).bfloat16(), torch.rand(len(base), per_token, device=device)
    right = moe_batch.experts(z.float(), chosen, share, w, shape)
    for most, sizes in moe_triton.TUNED.sizes:
        tuned = moe_triton.Tuning(sizes=((most, sizes),))
        error = relative(moe_triton.experts(z, chosen, share, w, shape, tuning=tuned), right)
        assert error <= 2 * ERROR_MAX, f"experts are wrong on skewed routing, tiles for {most}: {error}"
        yield Row(name=f"experts error, skewed, tiles for a mean of {most}", value=error, unit="relative")


def gold(z: Tensor, chosen: Tensor, share: Tensor, w: Experts, shape: ModelShape) -> Tensor:
    """The same sum in float64, expert by expert."""
    total = torch.zeros(z.shape, dtype=torch.float64, device=z.device)
    for e in torch.unique(chosen).tolist():
        token, place = (chosen == e).nonzero(as_tuple=True)
        one = torch.tensor([e], device=z.device)
        w1, w3, w2 = (part.of(one)[0].double() for part in (w.w1, w.w3, w.w2))
        x = z[token].double()
        h = reference.glu(x @ w1.T, x @ w3.T, shape)
        total.index_add_(0, token, (h @ w2.T) * share[token, place, None].double())
    return total


def floor_ms(used: int, tokens: int, per_token: int, w: Experts) -> float:
    """Of `used` distinct experts and `tokens` tokens of `per_token` each."""
    parts = [part for part in (w.w1, w.w3, w.w2) if isinstance(part, Packed)]
    weights = used * sum(part.packed[0].nbytes + part.scale[0].nbytes for part in parts)
    rows_bytes = 2 * tokens * _packed(w.w2).shape[1] * costs.BF16
    flops = 2 * tokens * per_token * sum(part.expert_elements for part in parts)
    return max((weights + rows_bytes) / COPY_BYTES_PER_MS, flops / FLOP_PER_MS)


def _packed(part: object) -> Tensor:
    assert isinstance(part, Packed)
    return part.packed


def _row(
    tokens: int,
    per_token: int,
    w: Experts,
    shape: ModelShape,
    dtype: torch.dtype,
    repeats: int,
    published: Reference | None,
) -> Iterator[Row]:
    device = _packed(w.w1).device
    z = torch.randn(tokens, _packed(w.w2).shape[1], device=device).to(dtype)
    chosen, share = routing(tokens, _packed(w.w1).shape[0], per_token, device)
    used = len(torch.unique(chosen))
    ms = median_ms(lambda: by_device.experts(z, chosen, share, w, shape), device, repeats)
    name = f"experts T {tokens}, {used} distinct"
    floor = Reference(name="floor", value=floor_ms(used, tokens, per_token, w))
    yield Row(name=name, value=ms, unit="ms", reference=floor)
    if published is not None:
        yield Row(name=name, value=ms, unit="ms", reference=published)


def _route_rows(device: torch.device, repeats: int) -> Iterator[Row]:
    """The router, checked against its twin on inputs without near ties."""
    m = K3.moe
    gate = torch.randn(m.experts, K3.hidden, device=device) * K3.hidden**-0.5
    bias = torch.randn(m.experts, device=device) * 0.1
    from forebay.kernels import moe_triton

    for tokens in (1, 16, 64, 4096):
        x = torch.randn(tokens, K3.hidden, device=device).bfloat16()
        found = moe_triton.route(x, gate, bias, m.per_token, m.scaling, m.renormalize)
        right = moe.route(x, gate, bias, m.per_token, m.scaling, m.renormalize)
        same = float((found[0] == right[0]).all(1).float().mean())
        assert same >= 0.99, f"the router chooses other experts for {1 - same:.1%} of the tokens"
        ms = median_ms(
            lambda x=x: moe_triton.route(x, gate, bias, m.per_token, m.scaling, m.renormalize),  # type: ignore[misc]
            device,
            repeats,
        )
        moved = gate.nbytes + x.nbytes
        flops = 2 * tokens * gate.numel()
        floor = Reference(name="floor", value=max(moved / COPY_BYTES_PER_MS, flops / FP32_FLOP_PER_MS))
        yield Row(name=f"route T {tokens}", value=ms, unit="ms", reference=floor)

"""Router, experts, MXFP4 and the gated units against their slow twins."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forebay.kernels import moe, mxfp4, reference
from forebay.kernels.models import K3, KIMI_LINEAR_48B


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_experts(count: int, latent: int, width: int, packed: bool) -> moe.Experts:
    def weights(seed: int, out: int, into: int) -> moe.Dense | moe.Packed:
        w = (draw(seed, count, out, into) * into**-0.5).float()
        return moe.Packed(*mxfp4.quantize(w)) if packed else moe.Dense(w)

    return moe.Experts(w1=weights(1, width, latent), w3=weights(2, width, latent), w2=weights(3, latent, width))


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "mxfp4"])
@pytest.mark.parametrize("tokens", [1, 5, 40], ids="T{}".format)
@pytest.mark.parametrize("shape", [K3, KIMI_LINEAR_48B], ids=lambda shape: shape.activation)
def test_experts(packed: bool, tokens: int, shape: type(K3)) -> None:  # type: ignore[valid-type]
    w, z = make_experts(6, 32, 64, packed), draw(4, tokens, 32)
    chosen, weights = reference.route(draw(5, tokens, 16), draw(6, 6, 16), draw(7, 6), 3, 2.5, True)
    found = moe.experts(z.float(), chosen, weights.float(), w, shape)
    assert torch.allclose(found.double(), reference.experts(z, chosen, weights, w, shape), atol=5e-6)


def test_experts_unpacked_in_bounded_groups_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    w, z = make_experts(6, 32, 64, True), draw(4, 40, 32).float()
    chosen, weights = moe.route(draw(5, 40, 16).float(), draw(6, 6, 16).float(), torch.zeros(6), 3, 1.0, True)
    together = moe.experts(z, chosen, weights, w, K3)
    monkeypatch.setattr(moe, "GROUP_BYTES", 1)
    assert torch.equal(moe.experts(z, chosen, weights, w, K3), together)


@pytest.mark.parametrize("renormalize", [False, True])
def test_route(renormalize: bool) -> None:
    x, gate_w, bias = draw(1, 30, 16), draw(2, 12, 16), draw(3, 12)
    chosen, weights = moe.route(x.float(), gate_w.float(), bias.float(), 4, 1.7, renormalize)
    expected, expected_weights = reference.route(x, gate_w, bias, 4, 1.7, renormalize)
    assert torch.equal(chosen, expected)
    assert torch.allclose(weights.double(), expected_weights, atol=1e-6)


def test_the_bias_chooses_but_never_weighs() -> None:
    x, gate_w = torch.zeros(1, 8), torch.zeros(4, 8)
    chosen, weights = moe.route(x, gate_w, torch.tensor([0.0, 9.0, 0.0, 9.0]), 2, 1.0, True)
    assert chosen.tolist() == [[1, 3]]
    assert weights.tolist() == [[0.5, 0.5]]


def test_equal_scores_choose_the_lowest_experts() -> None:
    chosen, _ = moe.route(torch.zeros(1, 8), torch.zeros(40, 8), torch.zeros(40), 3, 1.0, True)
    assert chosen.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("shape", [K3, KIMI_LINEAR_48B], ids=lambda shape: shape.activation)
def test_glu(shape: type(K3)) -> None:  # type: ignore[valid-type]
    gate, up = draw(1, 200) * 10, draw(2, 200) * 100
    found = moe.glu(gate.float(), up.float(), shape)
    assert torch.allclose(found.double(), reference.glu(gate, up, shape), rtol=1e-5, atol=1e-5)


def test_situ_is_bounded_and_has_slope_one_at_zero() -> None:
    huge = torch.tensor([-1e30, 1e30])
    assert float(moe.glu(huge[:, None], huge[None], K3).abs().max()) <= 100.0
    small = torch.tensor([1e-3])
    assert torch.allclose(
        moe.glu(torch.tensor([2.0]), small, K3) / small, moe.glu(torch.tensor([2.0]), torch.ones(1), K3), rtol=1e-3
    )
    assert moe.glu(small, small, replace(K3, activation="silu")).shape == (1,)


def test_every_byte_unpacks_as_its_two_codes() -> None:
    packed = torch.arange(256, dtype=torch.int64).to(torch.uint8).view(16, 16)
    scale = torch.arange(112, 128).to(torch.uint8)[:, None]
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(mxfp4.unpack(packed, scale, dtype), reference.unpack(packed, scale, dtype))
    assert mxfp4.unpack(packed[None], scale[None]).shape == (1, 16, 32)


def test_quantized_weights_are_near_and_quantize_to_themselves(examples: Callable[[int], int]) -> None:
    @settings(max_examples=examples(300))
    @given(st.integers(0, 10_000), st.integers(-100, 100))
    def run(seed: int, exponent: int) -> None:
        w = draw(seed, 4, 64).float() * 2.0**exponent
        packed, scale = mxfp4.quantize(w)
        back = mxfp4.unpack(packed, scale)
        step = torch.exp2(scale.float() - 127).repeat_interleave(32, dim=1)
        # Codes reach 6, with steps of 2 above 4; a maximum below 7 · step is the rule that chose the scale.
        assert bool(((back - w).abs() <= step).all())
        again = mxfp4.quantize(back)
        assert torch.equal(mxfp4.unpack(*again), back)

    run()


def test_a_group_of_zeros() -> None:
    packed, scale = mxfp4.quantize(torch.tensor([0.0, -0.0]).repeat(16)[None])
    assert scale.tolist() == [[0]]
    assert packed.unique().tolist() == [0]

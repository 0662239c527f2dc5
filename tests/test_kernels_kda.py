"""KDA's ladder: recurrent form = chunked form (both as the paper has them) = the fast chunked form = the fast step."""

from collections.abc import Callable
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forebay.kernels import conv, kda, reference
from forebay.kernels.shapes import Gate

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
DIMS = st.sampled_from([8, 16, 32])


def make_inputs(tokens: int, heads: int, dims: tuple[int, int], kind: Gate, seed: int, spread: float = 3.0) -> Inputs:
    """Float64 q, k, v, g, beta, state; `spread` widens the raw gate until its limits."""
    random = torch.Generator().manual_seed(seed)
    key, value = dims

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    z, A_log, bias = draw(tokens, heads, key) * spread, draw(heads), draw(heads * key)
    g = reference.gate(z, A_log, bias, kind, -5.0)
    beta = torch.sigmoid(draw(tokens, heads))
    return (
        draw(tokens, heads, key),
        draw(tokens, heads, key),
        draw(tokens, heads, value),
        g,
        beta,
        draw(heads, key, value),
    )


def single(inputs: Inputs) -> Inputs:
    q, k, v, g, beta, state = (x.float() for x in inputs)
    return q, k, v, g, beta, state


def assert_near(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], tolerance: float) -> None:
    for a, b in zip(found, expected, strict=True):
        scale = max(1.0, float(b.abs().max()))
        assert float((a.double() - b).abs().max()) <= tolerance * scale


@pytest.mark.parametrize("kind", get_args(Gate))
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 50], ids="T{}".format)
@pytest.mark.parametrize("heads", [1, 3], ids="H{}".format)
def test_the_ladder(kind: Gate, tokens: int, heads: int) -> None:
    inputs = make_inputs(tokens, heads, (16, 24), kind, seed=tokens)
    gold = reference.recurrent(*inputs)
    assert_near(reference.chunk(*inputs), gold, 1e-12)
    assert_near(kda.chunk(*single(inputs)), gold, 2e-6)


def test_every_shape_gives_what_the_recurrence_gives(examples: Callable[[int], int]) -> None:
    @settings(max_examples=examples(300))
    @given(
        st.integers(1, 70),
        st.integers(1, 3),
        st.tuples(DIMS, DIMS),
        st.sampled_from(get_args(Gate)),
        st.integers(0, 99),
    )
    def run(tokens: int, heads: int, dims: tuple[int, int], kind: Gate, seed: int) -> None:
        inputs = make_inputs(tokens, heads, dims, kind, seed, spread=1.0 + seed % 7)
        assert_near(kda.chunk(*single(inputs)), reference.recurrent(*inputs), 3e-6)

    run()


@pytest.mark.parametrize("kind", get_args(Gate))
def test_decay_at_its_limit_neither_overflows_nor_blurs(kind: Gate) -> None:
    inputs = make_inputs(48, 2, (32, 32), kind, seed=3, spread=60.0)
    assert float(inputs[3].sum(0).min()) < -150
    assert_near(kda.chunk(*single(inputs)), reference.recurrent(*inputs), 2e-6)


def test_one_key_over_and_over_without_decay() -> None:
    """I + A is then all ones below its diagonal: its inverse by a power series would lose four digits."""
    q, k, v, g, beta, state = make_inputs(64, 2, (16, 16), "bounded", seed=5)
    inputs = (q, k[:1].expand_as(k), v, torch.zeros_like(g), torch.ones_like(beta), state)
    assert_near(kda.chunk(*single(inputs)), reference.recurrent(*inputs), 3e-6)


def test_steps_of_a_batch_are_the_sequences_of_it() -> None:
    inputs = make_inputs(9, 2, (16, 8), "bounded", seed=7)
    q, k, v, g, beta, state = single(inputs)
    states = torch.stack([state * (b + 1) for b in range(9)])
    found = kda.step(q, k, v, g, beta, states)
    expected = reference.step(*inputs[:5], states.double())
    assert_near(found, expected, 1e-6)


@pytest.mark.parametrize("cut", [16, 48, 80, 96])
def test_a_prefill_cut_on_the_grid_keeps_every_bit(cut: int) -> None:
    q, k, v, g, beta, state = single(make_inputs(103, 3, (32, 32), "bounded", seed=cut))
    o, final = kda.chunk(q, k, v, g, beta, state)
    o1, middle = kda.chunk(q[:cut], k[:cut], v[:cut], g[:cut], beta[:cut], state)
    o2, end = kda.chunk(q[cut:], k[cut:], v[cut:], g[cut:], beta[cut:], middle)
    assert torch.equal(torch.cat((o1, o2)), o)
    assert torch.equal(end, final)


def test_what_comes_later_in_a_chunk_changes_no_bit_before_it() -> None:
    q, k, v, g, beta, state = single(make_inputs(40, 2, (32, 16), "softplus", seed=9))
    whole, _ = kda.chunk(q, k, v, g, beta, state)
    for end in range(1, 40):
        assert torch.equal(kda.chunk(q[:end], k[:end], v[:end], g[:end], beta[:end], state)[0], whole[:end])


def test_gradients_are_those_of_the_recurrence() -> None:
    inputs = make_inputs(20, 2, (8, 8), "bounded", seed=11)
    wide = [x.requires_grad_() for x in inputs]
    narrow = [x.detach().float().requires_grad_() for x in inputs]
    for run, args in ((reference.recurrent, wide), (kda.chunk, narrow)):
        o, state = run(*args)
        (o.square().sum() + state.square().sum()).backward()
    for a, b in zip(narrow, wide, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.allclose(a.grad.double(), b.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", get_args(Gate))
def test_the_gate(kind: Gate) -> None:
    z = torch.linspace(-40, 40, 81, dtype=torch.float64).view(-1, 1, 1).expand(-1, 2, 3)
    A_log, bias = torch.tensor([0.5, -2.0]).double(), torch.arange(6).double()
    found = kda.gate(z.float(), A_log.float(), bias.float(), kind, -5.0)
    expected = reference.gate(z, A_log, bias, kind, -5.0)
    assert torch.allclose(found.double(), expected, rtol=2e-6, atol=1e-12)
    assert float(found.max()) <= 0


def test_the_convolution_goes_on_where_it_stopped() -> None:
    random = torch.Generator().manual_seed(13)
    x, weight = torch.randn(30, 24, generator=random), torch.randn(24, 4, generator=random)
    tail = torch.randn(3, 24, generator=random)
    y, end = conv.short_conv(x, weight, tail)
    expected, _ = reference.short_conv(x.double(), weight.double(), tail.double())
    assert torch.allclose(y.double(), expected, atol=1e-6)
    for cut in (1, 2, 3, 11):
        first, middle = conv.short_conv(x[:cut], weight, tail)
        second, last = conv.short_conv(x[cut:], weight, middle)
        assert torch.equal(torch.cat((first, second)), y)
        assert torch.equal(last, end)


def test_a_convolution_step_has_the_bits_of_the_whole() -> None:
    random = torch.Generator().manual_seed(17)
    x, weight = torch.randn(12, 8, generator=random), torch.randn(8, 4, generator=random)
    y, end = conv.short_conv(x, weight, torch.zeros(3, 8))
    tails = torch.zeros(1, 3, 8)
    for t in range(12):
        row, tails = conv.short_conv_step(x[t : t + 1], weight, tails)
        assert torch.equal(row[0], y[t])
    assert torch.equal(tails[0], end)

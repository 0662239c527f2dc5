"""Random weights: a function of their arguments, of released form, sane through all layers, and routers that choose as
they were seen to."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from torch import Tensor

from forebay.kernels import floors, mxfp4
from forebay.kernels.models import K3_1_SLICE, KIMI_LINEAR_48B, rank_slice
from forebay.kernels.moe import Packed
from forebay.kernels.shapes import ModelShape
from forebay.workers.layers import MoeWeights
from forebay.workers.made_contexts import made_contexts
from forebay.workers.model import Model
from forebay.workers.random_weights import random_weights
from forebay.workers.residual import Trace

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small(shape: ModelShape, experts: int) -> ModelShape:
    """Six layers of it, narrow, with `experts` experts of which each token takes 8."""
    narrow = rank_slice(shape, name=shape.name, ranks=1, layers=6)
    return replace(
        narrow,
        hidden=256,
        vocab=2048,
        dense_width=256,
        kda=replace(shape.kda, heads=2, head_dim=32, gate_rank=32),
        mla=replace(
            shape.mla,
            heads=2,
            q_rank=64 if shape.mla.q_rank else None,
            kv_rank=64,
            nope_dim=32,
            pe_dim=16,
            value_dim=32,
        ),
        index=None if shape.index is None else replace(shape.index, heads=2, head_dim=32, top_k=64),
        moe=replace(
            shape.moe,
            experts=experts,
            per_token=8,
            width=32,
            shared_width=64,
            latent=64 if shape.moe.latent else None,
        ),
        attn_res_block=4 if shape.attn_res_block else None,
    )


def tensors(weights: object) -> list[Tensor]:
    """All tensors of a tree of dataclasses and tuples, in order."""
    if isinstance(weights, Tensor):
        return [weights]
    if is_dataclass(weights):
        return [found for field in fields(weights) for found in tensors(getattr(weights, field.name))]
    return [found for part in weights for found in tensors(part)] if isinstance(weights, tuple) else []


@pytest.mark.parametrize("released", [KIMI_LINEAR_48B, K3_1_SLICE], ids=lambda shape: shape.name)
def test_a_function_of_shape_and_seed(released: ModelShape) -> None:
    shape = small(released, 16)
    one, same, other = (tensors(random_weights(shape, seed, CPU, torch.bfloat16)) for seed in (5, 5, 6))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert sum(torch.equal(a, b) for a, b in zip(one, other, strict=True)) == sum(
        bool((a == a.flatten()[0]).all()) for a in one
    ), "all but the constants change with the seed"


@pytest.mark.parametrize("released", [KIMI_LINEAR_48B, K3_1_SLICE], ids=lambda shape: shape.name)
def test_routers_choose_as_they_were_seen_to(released: ModelShape) -> None:
    """Distinct experts a layer, over some steps of each batch; activations of every layer stay near one."""
    shape = small(released, KIMI_LINEAR_48B.moe.experts)
    model = Model(shape, random_weights(shape, 1, CPU, torch.float32), 32, b"")
    for batch, expected, n in ((1, 8, 1), (8, 57, 4), (32, 157, 2), (128, 246, 1)):
        trace = steps(model, batch, n)
        met = sum(len(chosen.unique()) for chosen in trace.chosen) / len(trace.chosen)
        assert met == pytest.approx(expected, rel=0.04), batch
        assert expected == pytest.approx(floors.distinct_experts(shape.moe, batch), abs=1)
        scales = [float(prefix.square().mean().sqrt()) for prefix in trace.prefixes]
        assert min(scales) > 0.1
        assert max(scales) < 2


def steps(model: Model, batch: int, n: int) -> Trace:
    """Greedy steps from random tokens, after contexts of 40 made-up tokens."""
    ids = torch.randint(0, model.shape.vocab, (batch,), generator=torch.Generator().manual_seed(batch))
    contexts = made_contexts(model.shape, model.layout, model.dtype, CPU, batch, 40, 64)
    trace = Trace()
    for step in range(n):
        logits = model.decode(ids, [40 + step] * batch, contexts.tables, contexts.pool, trace)
        assert 0.5 < float(logits.std()) < 2
        ids = logits.argmax(1)
    return trace


def test_routers_without_a_bias_meet_more() -> None:
    """The statistic can fail."""
    shape = small(KIMI_LINEAR_48B, KIMI_LINEAR_48B.moe.experts)
    weights = random_weights(shape, 1, CPU, torch.float32)
    even = tuple(
        replace(layer, mlp=replace(layer.mlp, bias=torch.zeros_like(layer.mlp.bias)))
        if isinstance(layer.mlp, MoeWeights)
        else layer
        for layer in weights.layers
    )
    as_seen, evenly = (
        sum(len(chosen.unique()) for chosen in steps(Model(shape, drawn, 32, b""), 128, 1).chosen) / 5
        for drawn in (weights, replace(weights, layers=even))
    )
    assert evenly == pytest.approx(floors.distinct_experts(shape.moe, 128, spread=0.0), rel=0.02)
    assert evenly > as_seen + 3


def test_packed_experts_keep_the_scale_of_their_input() -> None:
    shape = small(K3_1_SLICE, 16)
    moe = random_weights(shape, 3, CPU, torch.float32).layers[1].mlp
    assert isinstance(moe, MoeWeights)
    for part, into in ((moe.experts.w1, 64), (moe.experts.w2, 32)):
        assert isinstance(part, Packed)
        square = float(mxfp4.unpack(part.packed, part.scale).square().mean())
        assert square * into == pytest.approx(1.0, rel=0.05)

"""Fast mode under the engine's measurements: its pages, its passes, and where its step's time goes."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from forebay.kernels import dsa, dsa_batch, layer_parts
from forebay.kernels.mla_batch import Pages
from forebay.kernels.models import K3_1_SLICE, KIMI_LINEAR_48B, rank_slice
from forebay.kernels.shapes import ModelShape
from forebay.workers.engine_fast import OPERATORS, write_key_groups
from forebay.workers.engine_make import make_engine, modes_of
from forebay.workers.engine_plan import SMALL
from forebay.workers.made_contexts import empty_contexts

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small(shape: ModelShape) -> ModelShape:
    """Four layers of it, narrow."""
    narrow = rank_slice(shape, name=shape.name, ranks=1, layers=4)
    return replace(
        narrow,
        hidden=64,
        vocab=512,
        dense_width=64,
        kda=replace(shape.kda, heads=2, head_dim=16, gate_rank=16),
        mla=replace(
            shape.mla,
            heads=2,
            q_rank=32 if shape.mla.q_rank else None,
            kv_rank=32,
            nope_dim=16,
            pe_dim=16,
            value_dim=16,
        ),
        index=None if shape.index is None else replace(shape.index, heads=2, head_dim=16, top_k=32),
        moe=replace(
            shape.moe,
            experts=8,
            per_token=2,
            width=32,
            shared_width=32,
            latent=32 if shape.moe.latent else None,
        ),
    )


def test_made_up_keys_lie_as_the_kernels_read_them() -> None:
    keys = torch.randn(3, 128, 16)
    pages = torch.zeros(3, 128, 20, dtype=torch.uint8)
    write_key_groups(keys, pages)
    found = dsa_batch.read_keys(Pages(pool=pages, table=torch.tensor([[2], [0]], dtype=torch.int32)), 128)
    kept = dsa.dequantize_keys(dsa.quantize_keys(keys))
    assert torch.equal(found, kept[[2, 0]])


@pytest.mark.parametrize("released", [KIMI_LINEAR_48B, K3_1_SLICE], ids=lambda shape: shape.name)
def test_its_passes_are_those_of_exact_mode(released: ModelShape) -> None:
    """The same weights: the same token after a prompt in chunks, and the same experts chosen."""
    shape, plan = small(released), replace(SMALL, block_tokens=64, chunk_tokens=64)
    ids = torch.arange(150) * 7 % shape.vocab
    told = []
    for mode in ("exact", "fast"):
        engine = make_engine(mode, shape, plan, CPU)
        token = engine.prefill(empty_contexts(engine.layout, CPU, 1, 150), ids, 0)
        made = engine.made_contexts(4, 64, 80)
        told.append((token, [chosen.tolist() for chosen in engine.chosen(made, torch.arange(4))]))
        engine.decoding(made, torch.arange(4))(3)
    assert told[0] == told[1]


def test_all_operators_are_timed() -> None:
    before = layer_parts.mix
    engine = make_engine("fast", small(K3_1_SLICE), replace(SMALL, block_tokens=64), CPU)
    spent = engine.operators_ms(engine.made_contexts(2, 64, 80), torch.arange(2), 2)
    assert spent.keys() == OPERATORS.places.keys()
    assert min(spent.values()) > 0
    assert layer_parts.mix is before


def test_a_cpu_has_one_mode() -> None:
    assert modes_of(CPU) == ("exact",)
    assert modes_of(torch.device("cuda")) == ("fast", "exact")

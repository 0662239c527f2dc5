"""Floors of a pass follow from the shape: published figures, counts made another way, and what fits one GPU."""

import numpy as np
import pytest

from forebay.kernels import costs, floors
from forebay.kernels.models import K3_1_PRO, K3_1_SLICE, KIMI_LINEAR_48B, rank_slice
from forebay.kernels.shapes import ModelShape

PUBLISHED_MS = {
    (1, 1 << 10): 1.49,
    (8, 1 << 10): 5.85,
    (32, 1 << 10): 15.1,
    (128, 1 << 10): 25.0,
    (1, 1 << 15): 1.55,
    (8, 1 << 15): 6.33,
    (32, 1 << 15): 17.0,
    (1, 1 << 17): 1.73,
}
GPU_BYTES = 139 << 30


@pytest.mark.parametrize(("batch", "context"), PUBLISHED_MS, ids=str)
def test_the_published_floors_of_a_decode_step(batch: int, context: int) -> None:
    found = floors.floor_ms(floors.step_work(KIMI_LINEAR_48B, batch, context), floors.H200)
    assert found == pytest.approx(PUBLISHED_MS[batch, context], rel=0.02)


@pytest.mark.parametrize(("batch", "distinct"), [(1, 8), (8, 57), (32, 157), (128, 246)])
def test_the_published_counts_of_distinct_experts(batch: int, distinct: int) -> None:
    assert floors.distinct_experts(KIMI_LINEAR_48B.moe, batch) == pytest.approx(distinct, abs=1)


def test_distinct_experts_as_drawn() -> None:
    random, moe = np.random.default_rng(3), KIMI_LINEAR_48B.moe
    drawn = [len(np.unique(random.random((32, moe.experts)).argsort(1)[:, : moe.per_token])) for _ in range(200)]
    assert floors.distinct_experts(moe, 32, spread=0.0) == pytest.approx(np.mean(drawn), rel=0.01)


@pytest.mark.parametrize("shape", [KIMI_LINEAR_48B, K3_1_PRO, K3_1_SLICE], ids=lambda shape: shape.name)
def test_a_step_that_meets_every_expert_reads_the_whole_model(shape: ModelShape) -> None:
    """All but the embedding, the norms of layers and the pseudo-queries, which are thousandths."""
    met = floors.step_work(shape, 1, 0, distinct=shape.moe.experts)
    weights = sum(work.n_bytes for name, work in met.items() if name not in ("KDA states", "latent rows", "index keys"))
    count = costs.parameters(shape)
    kept = (count.total - count.experts - shape.vocab * shape.hidden) * costs.BF16 + costs.expert_bytes(shape)
    assert weights == pytest.approx(kept, rel=1e-3)


def test_the_arithmetic_of_a_prefill() -> None:
    """Two FLOPs a token and active parameter (the head for the last token alone), and pairs of tokens by hand."""
    shape, tokens = KIMI_LINEAR_48B, 8192
    work = floors.prefill_work(shape, 0, tokens)
    head = shape.vocab * shape.hidden
    products = sum(
        work.flops for name, work in work.items() if name not in ("KDA states", "latent rows", "index keys", "head")
    )
    assert products == pytest.approx(2 * tokens * (costs.parameters(shape).active - head), rel=1e-3)
    assert work["head"].flops == 2 * head
    pairs = sum(range(1, tokens + 1))
    assert work["latent rows"].flops == pairs * costs.dense_attention_flops(shape, 1)
    assert floors.floor_ms(work, floors.H200) == pytest.approx(63.7, abs=0.1)


@pytest.mark.parametrize(("start", "tokens"), [(0, 100), (0, 3000), (2000, 100), (2047, 1), (2048, 512), (5000, 10)])
def test_pairs_of_sparse_attention(start: int, tokens: int) -> None:
    top_k = K3_1_SLICE.index.top_k if K3_1_SLICE.index else 0
    attended = sum(min(at + 1, top_k) for at in range(start, start + tokens))
    work = floors.prefill_work(K3_1_SLICE, start, tokens)
    assert work["latent rows"].flops == attended * costs.dense_attention_flops(K3_1_SLICE, 1)
    scored = sum(range(start + 1, start + tokens + 1))
    assert work["index keys"].flops == scored * costs.index_flops(K3_1_SLICE, 1)


def test_chunks_meet_the_weights_again() -> None:
    once, twice = (floors.prefill_work(KIMI_LINEAR_48B, 0, 8192, passes) for passes in (1, 2))
    assert twice["dense MLP"].n_bytes == 2 * once["dense MLP"].n_bytes
    assert twice["dense MLP"].flops == once["dense MLP"].flops


def test_as_many_layers_as_one_gpu_holds() -> None:
    """Weights, the cache of 32 sequences of 32k tokens, and room for what a pass works on."""

    def needed(layers: int) -> float:
        shape = rank_slice(K3_1_PRO, name="", ranks=8, layers=layers)
        count, row = costs.parameters(shape), costs.latent_row_bytes(shape) + (costs.index_row_bytes(shape) or 0)
        weights = (count.total - count.experts) * costs.BF16 + costs.expert_bytes(shape)
        rows = 32 * (1 << 15) * len(shape.global_layers) * row
        return weights + rows + 32 * len(shape.kda_layers) * costs.state_bytes(shape) + (8 << 30)

    group = 4
    assert K3_1_SLICE.layers % group == 0
    assert needed(K3_1_SLICE.layers) < GPU_BYTES < needed(K3_1_SLICE.layers + group)


def test_a_rank_has_its_share() -> None:
    whole, rank = K3_1_PRO, K3_1_SLICE
    assert rank.kda.heads * 8 == whole.kda.heads
    assert costs.matrix_bytes(rank) == costs.matrix_bytes(whole, tp=8)
    assert costs.latent_row_bytes(rank) == costs.latent_row_bytes(whole)
    assert costs.expert_bytes(rank) * 8 / (rank.layers - 1) == costs.expert_bytes(whole) / (whole.layers - 1)

"""Latent attention, the indexer and the sparse read against their slow twins and against each other."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forebay.kernels import dsa, mla, reference

HEADS, NOPE, PE, RANK, VALUE = 3, 16, 8, 24, 20


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_layer(tokens: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Float64 queries and rows of `tokens` tokens, w_uk, w_uv."""
    q, rows = draw(seed, tokens, HEADS, NOPE + PE) * 2, draw(seed + 1, tokens, RANK + PE)
    return q, rows, draw(seed + 2, HEADS, NOPE, RANK) * RANK**-0.5, draw(seed + 3, HEADS, RANK, VALUE) * RANK**-0.5


def near(found: Tensor, expected: Tensor, tolerance: float = 3e-6) -> bool:
    return bool((found.double() - expected).abs().max() <= tolerance)


@pytest.mark.parametrize(("start", "tokens"), [(0, 1), (0, 37), (250, 12), (256, 5), (511, 2), (600, 9)])
def test_prefill_is_dense_causal_attention(start: int, tokens: int) -> None:
    q, rows, w_uk, w_uv = make_layer(start + tokens)
    found = mla.attend_prefill(q[start:].float(), rows.float(), w_uk.float(), w_uv.float(), start)
    assert near(found, reference.attend_prefill(q[start:], rows, w_uk, w_uv, start))


def test_absorbed_decode_is_the_same_attention() -> None:
    lengths = torch.tensor([1, 2, 63, 64, 65, 128, 200])
    q, rows, w_uk, w_uv = make_layer(200)
    batch = torch.stack([rows.roll(b, 0) for b in range(len(lengths))])
    found = mla.attend_decode(q[:7].float(), batch.float(), lengths, w_uk.float(), w_uv.float())
    assert near(found, reference.attend_decode(q[:7], batch, lengths, w_uk, w_uv))


def test_rows_beyond_a_length_change_no_bit() -> None:
    q, rows, w_uk, w_uv = (x.float() for x in make_layer(300))
    lengths = torch.tensor([70])
    alone = mla.attend_decode(q[:1], rows[None, :70], lengths, w_uk, w_uv)
    rows[70:] = 1e6
    assert torch.equal(mla.attend_decode(q[:1], rows[None], lengths, w_uk, w_uv), alone)


def test_a_score_far_above_the_others_does_not_overflow() -> None:
    q, rows, w_uk, w_uv = make_layer(40)
    found = mla.attend_prefill((q * 300).float(), rows.float(), w_uk.float(), w_uv.float(), 0)
    assert near(found, reference.attend_prefill(q * 300, rows, w_uk, w_uv, 0), 1e-3)


def test_index_scores() -> None:
    q, w, keys = draw(1, 90, 4, 16), draw(2, 90, 4), draw(3, 90, 16)
    for start in (0, 50):
        found = dsa.index_scores(q[start:].float(), w[start:].float(), keys.float(), start)
        expected = reference.index_scores(q[start:], w[start:], keys, start)
        assert torch.equal(found == float("-inf"), expected == float("-inf"))
        assert near(found.nan_to_num(neginf=0.0), expected.nan_to_num(neginf=0.0))


def test_index_scores_of_a_decode_batch() -> None:
    q, w, keys, lengths = draw(1, 5, 4, 16), draw(2, 5, 4), draw(3, 5, 150, 16), torch.tensor([1, 64, 65, 149, 150])
    found = dsa.index_scores_decode(q.float(), w.float(), keys.float(), lengths)
    expected = reference.index_scores_decode(q, w, keys, lengths)
    assert torch.equal(found == float("-inf"), expected == float("-inf"))
    assert near(found.nan_to_num(neginf=0.0), expected.nan_to_num(neginf=0.0))


def test_top_k_is_exact_with_ties_to_the_lowest_position(examples: Callable[[int], int]) -> None:
    """Lengths reach beyond where candidates are chosen by groups; few distinct values make ties the rule."""

    @settings(max_examples=examples(500))
    @given(st.integers(1, 400), st.integers(1, 12), st.integers(1, 60), st.integers(0, 10_000))
    def run(length: int, k: int, distinct: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        scores = torch.randint(-distinct, distinct + 1, (6, length), generator=random).float() / 8
        lengths = torch.randint(0, length + 1, (6, 1), generator=random)
        scores = scores.masked_fill(torch.arange(length) >= lengths, float("-inf"))
        assert torch.equal(dsa.top_k(scores, k), reference.top_k(scores, k))

    run()


def test_top_k_of_negative_zero_and_zero_is_a_tie() -> None:
    scores = torch.tensor([[-0.0, 0.0, -0.0, 0.0, 1.0]])
    assert dsa.top_k(scores, 3).tolist() == [[0, 1, 4]]


@pytest.mark.parametrize("k", [8, 16, 100])
def test_the_sparse_read(k: int) -> None:
    q, rows, w_uk, w_uv = make_layer(90)
    idx = reference.top_k(reference.index_scores(draw(5, 90, 4, 16), draw(6, 90, 4), draw(7, 90, 16), 0), k)
    chosen = rows[idx.clamp(min=0)]
    found = dsa.sparse_attend(q.float(), chosen.float(), idx, w_uk.float(), w_uv.float())
    assert near(found, reference.sparse_attend(q, chosen, idx, w_uk, w_uv))


def test_top_k_of_all_tokens_equals_dense_attention() -> None:
    q, rows, w_uk, w_uv = make_layer(150)
    lengths = torch.arange(1, 151)
    idx = torch.arange(200).expand(150, -1)
    idx = idx.masked_fill(idx >= lengths[:, None], -1)
    single = [x.float() for x in (q, rows, w_uk, w_uv)]
    sparse = dsa.sparse_attend(single[0], single[1][idx.clamp(min=0)], idx, *single[2:])
    dense = mla.attend_decode(single[0], single[1].expand(150, -1, -1), lengths, *single[2:])
    assert torch.equal(sparse, dense)
    assert near(sparse, reference.attend_prefill(q, rows, w_uk, w_uv, 0))


def test_rope_turns_pairs_of_halves() -> None:
    x, positions = draw(1, 50, 3, 16), torch.arange(50) * 7
    for rope_dim in (8, 16):
        found = dsa.rope_half_split(x.float(), positions, rope_dim, 10_000.0)
        expected = reference.rope_half_split(x, positions, rope_dim, 10_000.0)
        assert torch.allclose(found.double(), expected, atol=1e-4)
        assert torch.equal(found[..., rope_dim:], x[..., rope_dim:].float())
    assert torch.equal(dsa.rope_half_split(x, positions, 0, 10_000.0), x)


def test_fp8_keys_lie_within_half_a_step_and_survive_a_second_pass() -> None:
    keys = torch.cat((draw(1, 60, 32).float() * torch.logspace(-3, 3, 60)[:, None], torch.zeros(1, 32)))
    rows = dsa.quantize_keys(keys)
    back = dsa.dequantize_keys(rows)
    assert rows.shape == (61, 36)
    assert rows.dtype == torch.uint8
    scale = rows[:, 32:].contiguous().view(torch.float32)
    assert torch.equal(scale, torch.exp2(scale.log2().round()))
    # e4m3 keeps 3 mantissa bits: half a step is 2^-4 of the value, or of the smallest normal number 2^-6.
    assert bool(((back - keys).abs() <= torch.maximum(keys.abs(), scale * 2**-6) * 2**-4).all())
    assert torch.equal(dsa.dequantize_keys(dsa.quantize_keys(back)), back)

"""Attention, indexer and top-k on pages, in torch, against their slow twins on rows side by side."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forebay.kernels import dsa, dsa_batch, mla_batch, mla_paged, reference
from forebay.kernels.dsa_batch import GROUP
from forebay.kernels.mla_batch import Pages

HEADS, NOPE, PE, RANK, VALUE, PAGE = 3, 16, 8, 24, 20, 64
SCALE = (NOPE + PE) ** -0.5


def paged(rows: Tensor, page: int = PAGE) -> Pages:
    """Rows [N, S, width] dealt to pages in random order; where nobody's rows lie there are no numbers."""
    n, length, width = rows.shape
    pages = -(-length // page)
    table = torch.randperm(n * pages + 2)[: n * pages].view(n, pages).int()
    pool = torch.full((n * pages + 2, page, width), float("nan"))
    for sequence in range(n):
        for p in range(pages):
            part = rows[sequence, p * page : (p + 1) * page]
            pool[int(table[sequence, p]), : len(part)] = part
    return Pages(pool=pool, table=table)


def weights() -> tuple[Tensor, Tensor]:
    return torch.randn(HEADS, NOPE, RANK) * RANK**-0.5, torch.randn(HEADS, RANK, VALUE) * RANK**-0.5


def near(found: Tensor, expected: Tensor, tolerance: float = 3e-6) -> bool:
    return bool((found.double() - expected).abs().max() <= tolerance)


def test_gated_decode_is_dense_attention_times_its_gate() -> None:
    torch.manual_seed(1)
    rows, lengths, (w_uk, w_uv) = torch.randn(4, 150, RANK + PE), torch.tensor([1, 64, 65, 150]), weights()
    q, gate = torch.randn(4, HEADS, NOPE + PE), torch.randn(4, HEADS, VALUE)
    expected = reference.attend_decode(q.double(), rows.double(), lengths, w_uk.double(), w_uv.double())
    for logits, factor in ((gate, torch.sigmoid(gate.double())), (None, 1.0)):
        found = mla_paged.decode(q, paged(rows), lengths.int(), w_uk, w_uv, logits)
        assert near(found, expected * factor)


@pytest.mark.parametrize(("start", "tokens"), [(0, 1), (0, 70), (64, 30), (75, 5)])
def test_prefill_on_pages(start: int, tokens: int) -> None:
    torch.manual_seed(2)
    rows, (w_uk, w_uv) = torch.randn(1, start + tokens, RANK + PE), weights()
    q = torch.randn(tokens, HEADS, NOPE + PE)
    found = mla_paged.prefill(q, paged(rows), w_uk, w_uv, start, None)
    given_in_double = q.double(), rows[0].double(), w_uk.double(), w_uv.double()
    assert near(found, reference.attend_prefill(*given_in_double, start))


def sparse_inputs(tokens: int, sequences: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Pages, Pages]:
    """Rows [N, S, r+pe], q, index queries and weights of `tokens`, and the pages of rows and of written keys."""
    rows = torch.randn(sequences, 3 * PAGE, RANK + PE)
    q, index_q, w = torch.randn(tokens, HEADS, NOPE + PE), torch.randn(tokens, 4, 16), torch.randn(tokens, 4)
    table = torch.randperm(sequences * 2).view(sequences, 2).int()
    keys = Pages(pool=torch.randint(0, 64, (sequences * 2, 2 * GROUP, 20)).byte(), table=table)
    positions = torch.arange(3 * PAGE).int().repeat(sequences)
    dsa_batch.write_keys(torch.randn(sequences * 3 * PAGE, 16), positions, keys)
    return rows, q, index_q, w, paged(rows), keys


@pytest.mark.parametrize(("tokens", "sequences"), [(4, 4), (6, 1)])
def test_sparse_attention_reads_what_the_indexer_chooses(tokens: int, sequences: int) -> None:
    torch.manual_seed(3)
    rows, q, index_q, w, pages, keys = sparse_inputs(tokens, sequences)
    w_uk, w_uv = weights()
    lengths = torch.randint(1, 3 * PAGE + 1, (tokens,)).sort().values.int()
    found = mla_paged.sparse(q, index_q, w, pages, keys, lengths, 20, w_uk, w_uv, None)
    stored = dsa_batch.read_keys(keys, 3 * PAGE)
    queries = dsa.dequantize_keys(dsa.quantize_keys(index_q.flatten(0, 1))).view(index_q.shape)
    own = [t * sequences // tokens for t in range(tokens)]
    scores = reference.index_scores_decode(queries.double(), w.double(), stored[own].double(), lengths)
    idx = reference.top_k(scores, 20)
    read = torch.stack([rows[n][i.clamp(min=0)] for n, i in zip(own, idx, strict=True)])
    assert near(found, reference.sparse_attend(q.double(), read.double(), idx, w_uk.double(), w_uv.double()))


def test_top_k_of_all_tokens_equals_dense_attention() -> None:
    torch.manual_seed(4)
    _, q, index_q, w, pages, keys = sparse_inputs(3, 3)
    w_uk, w_uv = weights()
    lengths = torch.tensor([5, 64, 150]).int()
    sparse = mla_paged.sparse(q, index_q, w, pages, keys, lengths, 3 * PAGE, w_uk, w_uv, None)
    assert torch.equal(sparse, mla_paged.decode(q, pages, lengths, w_uk, w_uv, None))


def test_sequences_may_share_pages() -> None:
    torch.manual_seed(5)
    rows = torch.randn(3, 100, RANK + PE)
    rows[:, :PAGE] = rows[0, :PAGE]
    apart, lengths = paged(rows), torch.tensor([70, 100, 10]).int()
    table = apart.table.clone()
    table[:, 0] = table[0, 0]
    q, shared = torch.randn(3, HEADS, RANK + PE), dataclasses.replace(apart, table=table)
    assert torch.equal(*(mla_batch.attend(q, pages, lengths, SCALE, RANK) for pages in (apart, shared)))


def test_keys_come_back_as_quantized_and_fill_their_bytes_in_order(examples: Callable[[int], int]) -> None:
    """A page's first n tokens lie in its first n rows' bytes, for n a multiple of the group: what a cache copies."""

    @settings(max_examples=examples(100))
    @given(st.integers(1, 4 * GROUP), st.integers(0, 10_000))
    def run(length: int, seed: int) -> None:
        torch.manual_seed(seed)
        keys = torch.randn(length, 16) * torch.logspace(-2, 2, length)[:, None]
        pages = Pages(pool=torch.zeros(3, 2 * GROUP, 20, dtype=torch.uint8), table=torch.tensor([[2, 0]]).int())
        dsa_batch.write_keys(keys, torch.arange(length).int(), pages)
        expected = dsa.dequantize_keys(dsa.quantize_keys(keys))
        assert torch.equal(dsa_batch.read_keys(pages, length)[0], expected)
        kept = torch.zeros_like(pages.pool)
        kept[2, :GROUP], kept[0] = pages.pool[2, :GROUP], pages.pool[0]
        copied = dsa_batch.read_keys(dataclasses.replace(pages, pool=kept), min(length, GROUP))
        assert torch.equal(copied[0], expected[:GROUP])

    run()


def test_queries_divide_over_sequences() -> None:
    pages = paged(torch.randn(3, 10, RANK + PE))
    assert pages.queries_each(6) == 2
    with pytest.raises(AssertionError, match="divide"):
        pages.queries_each(4)

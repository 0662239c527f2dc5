"""The forward pass: bit-exactness however a prompt is split, paged and batched; decode agrees with prefill."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from small_models import BLOCK, CONFIGS, dirty_pool, pages_for, random_ids, small_model
from torch import Tensor

from forebay.kernels.kda import CHUNK
from forebay.kvstore.device import DevicePool
from forebay.workers.model import Model
from forebay.workers.step_pages import PageTable


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small make a second thread wait more than work; one test below asks for two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=list(CONFIGS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return small_model(request.param, tmp_path_factory.mktemp("model"))


def rows_and_states(model: Model, pool: DevicePool, pages: PageTable, n_tokens: int) -> list[Tensor]:
    """All bytes that a prefill of `n_tokens` leaves behind, in a form that does not show where its pages lie."""
    left = []
    for group in model.layout.paged:
        view = pool.rows(group.name, torch.uint8, group.row_bytes)
        table = torch.from_numpy(pages[group.name].astype(np.int64))
        left += [view[table[place]].flatten(0, 1)[:n_tokens] for place in range(len(group.layers))]
    for state in model.layout.states:
        left.append(pool.bytes[torch.from_numpy(pages[state.name].astype(np.int64))[:, 0], : state.state_bytes])
    return left


def prefilled(model: Model, ids: Tensor, cuts: list[int], seed: int) -> tuple[Tensor, list[Tensor]]:
    """Last logits and what lies in the pages after a prefill split at `cuts`, on shuffled pages of a dirty pool."""
    pages = pages_for(model.layout, len(ids) + 40, np.random.default_rng(seed))
    pool = dirty_pool(model.layout, 1 + max(int(table.max()) for table in pages.values()), [pages])
    edges = [0, *cuts, len(ids)]
    for start, end in pairwise(edges):
        logits = model.prefill(ids[start:end], start, pages, pool)
    return logits, rows_and_states(model, pool, pages, len(ids))


@pytest.mark.parametrize("n_tokens", [1, 31, 32, 33, 97, 300])
def test_prefill_is_the_same_however_it_is_split_and_paged(model: Model, n_tokens: int) -> None:
    ids = random_ids(model, n_tokens, seed=n_tokens)
    whole = prefilled(model, ids, [], seed=0)
    ends = list(range(BLOCK, n_tokens, BLOCK))
    for cuts in (ends, ends[-1:], ends[1::3]):
        logits, left = prefilled(model, ids, cuts, seed=1)
        assert torch.equal(logits, whole[0])
        assert all(torch.equal(a, b) for a, b in zip(left, whole[1], strict=True))


def test_two_threads_are_as_exact_as_one(tmp_path: Path) -> None:
    model = small_model("demo", tmp_path)
    ids = random_ids(model, 200, seed=2)
    torch.set_num_threads(2)
    whole, split = (prefilled(model, ids, cuts, seed=4) for cuts in ([], [64, 160]))
    torch.set_num_threads(1)
    assert torch.equal(whole[0], split[0])
    assert all(torch.equal(a, b) for a, b in zip(whole[1], split[1], strict=True))


def test_all_logits_end_with_the_last_ones_and_see_no_later_token(model: Model) -> None:
    ids = random_ids(model, 100, seed=3)
    pages = pages_for(model.layout, 100)
    logits = [
        model.prefill(ids[:n], 0, pages, dirty_pool(model.layout, 40, [pages]), all_logits=True) for n in (100, 71)
    ]
    assert torch.equal(logits[0][:71], logits[1])
    last = model.prefill(ids, 0, pages, dirty_pool(model.layout, 40, [pages]))
    assert torch.equal(last, logits[0][-1])


def decoded(model: Model, prompts: list[Tensor], steps: int, company: list[list[int]]) -> list[list[Tensor]]:
    """Logits of every step of every prompt, decoded in the batches of `company` (each a list of prompts)."""
    tables, first = [], 0
    for ids in prompts:
        tables.append(pages_for(model.layout, len(ids) + steps, first=first))
        first += model.layout.pages_for(len(ids) + steps) + model.layout.state_pages
    pool = dirty_pool(model.layout, first, tables)
    for ids, table in zip(prompts, tables, strict=True):
        model.prefill(ids, 0, table, pool)
    seen: list[list[Tensor]] = [[] for _ in prompts]
    for step in range(steps):
        for batch in company:
            ids = torch.tensor([(17 * who + 5 * step) % model.shape.vocab for who in batch])
            positions = [len(prompts[who]) + step for who in batch]
            logits = model.decode(ids, positions, [tables[who] for who in batch], pool)
            for who, row in zip(batch, logits, strict=True):
                seen[who].append(row)
    return seen


def test_a_decoded_row_is_the_same_in_any_batch(model: Model) -> None:
    prompts = [random_ids(model, n, seed=n) for n in (1, 40, 64, 95, 130, 7, 200, 33, 64)]
    alone = decoded(model, prompts, 3, [[who] for who in range(len(prompts))])
    for company in ([[*range(9)]], [[8, 0, 3], [5, 1], [2, 4, 6, 7]], [[6, 5, 4, 3, 2, 1, 0, 7], [8]]):
        together = decoded(model, prompts, 3, company)
        for rows, twins in zip(together, alone, strict=True):
            assert all(torch.equal(row, twin) for row, twin in zip(rows, twins, strict=True))


def test_decode_continues_what_prefill_computes(model: Model) -> None:
    """The recurrent and the chunked form are one function up to rounding."""
    ids = random_ids(model, 133, seed=11)
    pages = pages_for(model.layout, 133)
    whole = model.prefill(ids, 0, pages, dirty_pool(model.layout, 60, [pages]), all_logits=True)
    pool = dirty_pool(model.layout, 60, [pages])
    model.prefill(ids[:100], 0, pages, pool)
    steps = torch.cat([model.decode(ids[n : n + 1], [n], [pages], pool) for n in range(100, 133)])
    # fp8 keys may round to another code in the two forms, and so may a choice of rows; both are rare.
    bound = 5e-3 if model.shape.index is not None and model.shape.index.key_dtype == "fp8" else 5e-4
    assert (steps - whole[100:]).abs().median() < bound / 10
    assert (steps - whole[100:]).abs().max() < bound * 20


def test_prefill_asks_for_a_block_end(model: Model) -> None:
    pages = pages_for(model.layout, 100)
    with pytest.raises(AssertionError, match="block's end"):
        model.prefill(random_ids(model, 4, seed=0), CHUNK, pages, dirty_pool(model.layout, 40, [pages]))


def test_bfloat16_weights_and_rows_stay_near_float32(tmp_path: Path) -> None:
    """Root mean square, since one other choice of an expert moves single logits far."""
    fp32, bf16 = (small_model("k3-dense", tmp_path, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    ids = random_ids(fp32, 64, seed=1)
    logits = []
    for model in (fp32, bf16):
        pages = pages_for(model.layout, 64)
        logits.append(model.prefill(ids, 0, pages, dirty_pool(model.layout, 60, [pages]), all_logits=True))
    assert (logits[0] - logits[1]).square().mean().sqrt() < 0.25 * logits[0].std()


def test_the_fingerprint_names_all_that_a_cached_byte_depends_on(tmp_path: Path) -> None:
    model = small_model("kimi-linear", tmp_path)
    again = small_model("kimi-linear", tmp_path)
    assert model.fingerprint == again.fingerprint
    others = [
        small_model("kimi-linear", tmp_path, block=64),
        small_model("kimi-linear", tmp_path, dtype=torch.bfloat16),
        Model(model.shape, model.weights, BLOCK, b"other weights"),
    ]
    assert len({model.fingerprint, *(other.fingerprint for other in others)}) == 4

"""Fast mode's passes against exact mode's, on a CPU in fp32, where both run the same formulas in other code; and under
the workers.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from forebay.kernels.models import K3_1_PRO, KIMI_LINEAR_48B
from forebay.kernels.shapes import ModelShape
from forebay.kvstore.config import StoreConfig
from forebay.workers.config import WorkerConfig
from forebay.workers.fast_model import FastModel
from forebay.workers.job import Job, Sampling
from forebay.workers.local import Completion, LocalPair
from forebay.workers.made_contexts import empty_contexts
from forebay.workers.model import Model
from forebay.workers.random_weights import random_weights

BLOCK, PROMPT, STEPS = 64, 150, 5


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small(shape: ModelShape, layers: int, globals_: tuple[int, ...]) -> ModelShape:
    mla = replace(shape.mla, heads=2, kv_rank=32, nope_dim=16, pe_dim=16, value_dim=16)
    moe = replace(shape.moe, experts=16, per_token=3, width=64, shared_width=64)
    return replace(
        shape,
        layers=layers,
        hidden=64,
        vocab=96,
        dense_width=96,
        global_layers=globals_,
        kda=replace(shape.kda, heads=2, head_dim=16, gate_rank=16),
        mla=mla if shape.mla.q_rank is None else replace(mla, q_rank=32),
        moe=moe if shape.moe.latent is None else replace(moe, latent=32),
    )


LINEAR = small(KIMI_LINEAR_48B, 5, (1, 4))
K3_1 = replace(small(K3_1_PRO, 5, (2, 4)), attn_res_block=2)


def indexed(shape: ModelShape, top_k: int) -> ModelShape:
    assert shape.index is not None
    return replace(shape, index=replace(shape.index, heads=2, head_dim=32, top_k=top_k))


@pytest.mark.parametrize("shape", [LINEAR, indexed(K3_1, 4 * BLOCK)], ids=["kimi-linear", "k3.1, all rows chosen"])
def test_both_modes_say_the_same(shape: ModelShape) -> None:
    torch.manual_seed(3)
    cpu = torch.device("cpu")
    weights = random_weights(shape, 7, cpu, torch.float32)
    models = (Model(shape, weights, BLOCK, b"w"), FastModel(shape, weights, BLOCK, b"w"))
    prompts = [torch.randint(shape.vocab, (n,)) for n in (PROMPT, 2 * BLOCK)]
    rows: list[list[torch.Tensor]] = [[], []]
    for found, model in zip(rows, models, strict=True):
        contexts = empty_contexts(model.layout, cpu, len(prompts), 4 * BLOCK)
        for prompt, table in zip(prompts, contexts.tables, strict=True):
            model.prefill(prompt[:BLOCK], 0, table, contexts.pool)
            found.append(model.prefill(prompt[BLOCK:], BLOCK, table, contexts.pool))
        for step in range(STEPS):
            ids = torch.tensor([step, 90 - step])
            at = [len(prompt) + step for prompt in prompts]
            found += model.decode(ids, at, contexts.tables, contexts.pool).unbind()
    for exact, fast in zip(*rows, strict=True):
        assert torch.allclose(exact, fast, atol=2e-4, rtol=1e-4)
        assert exact.argmax() == fast.argmax()


def test_steps_go_on_alone() -> None:
    """Greedy steps without the host are the steps that it asks for one by one."""
    cpu = torch.device("cpu")
    weights = random_weights(LINEAR, 8, cpu, torch.float32)
    model = FastModel(LINEAR, weights, BLOCK, b"w")
    ids, told = torch.tensor([5, 6, 7]), []
    contexts = [empty_contexts(model.layout, cpu, 3, 2 * BLOCK) for _ in range(2)]
    alone = model.decoding(ids, [0, 0, 0], contexts[0].tables, contexts[0].pool)
    for step in range(STEPS):
        logits = model.decode(ids, [step] * 3, contexts[1].tables, contexts[1].pool)
        ids = logits.argmax(1)
        told.append(ids.tolist())
    assert [alone.step().tolist() for _ in range(STEPS)] == told


def job(name: str, ids: np.ndarray) -> Job:
    sampling = Sampling(temperature=0.0, max_tokens=STEPS)
    return Job(id=name, ids=ids, n_prompt=len(ids), seed=1, sampling=sampling, timeout_s=60.0)


@pytest.mark.parametrize("shape", [LINEAR, indexed(K3_1, 40)], ids=["kimi-linear", "k3.1"])
def test_the_workers_give_the_tokens_of_the_model_alone(shape: ModelShape, tmp_path: Path) -> None:
    """Cold, from the store, and beside another; the prompt ends inside a group of index keys."""
    cpu, room = torch.device("cpu"), 1 << 20
    model = FastModel(shape, random_weights(shape, 9, cpu, torch.float32), BLOCK, b"w")
    store = StoreConfig(device_bytes=room, host_bytes=0, handoff_bytes=room, run_dir=str(tmp_path))
    ids = np.random.default_rng(4).integers(0, shape.vocab, 2 * PROMPT + 7, dtype=np.int32)
    with LocalPair(model, WorkerConfig(block_tokens=BLOCK, chunk_tokens=2 * BLOCK, store=store)) as pair:
        cold, warm = pair.run(job("cold", ids)), pair.run(job("warm", ids))
        beside, _ = pair.run_all([job("one", ids), job("two", ids[:90])])
    contexts = empty_contexts(model.layout, cpu, 1, len(ids) + STEPS)
    told = [int(model.prefill(torch.from_numpy(ids).long(), 0, contexts.tables[0], contexts.pool).argmax())]
    while len(told) < STEPS:
        at = len(ids) + len(told) - 1
        told.append(int(model.decode(torch.tensor(told[-1:]), [at], contexts.tables, contexts.pool).argmax()))
    assert (cold.cached_tokens, warm.cached_tokens) == (0, len(ids) // BLOCK * BLOCK)
    assert isinstance(beside, Completion)
    assert list(cold.ids) == list(warm.ids) == list(beside.ids) == told

"""Training computes what serving computes, packs what it trained, and resumes where it stopped."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forebay.kernels import mxfp4
from forebay.kernels.shapes import ModelShape
from forebay.kvstore.device import DevicePool
from forebay.kvstore.layout import Layout
from forebay.workers import demo, train_balance, train_weights
from forebay.workers.hf_config import parse_config
from forebay.workers.model import load_model
from forebay.workers.train import Clock, Run, Stage, finish
from forebay.workers.train_data import load_rows
from forebay.workers.train_model import Batch
from forebay.workers.train_step import Step as TrainStep
from forebay.workers.train_step import router_biases

TOKENS, ROWS = 100, 2


def small_config() -> dict[str, Any]:
    config = copy.deepcopy(demo.CONFIG)
    text = config["text_config"]
    assert isinstance(text, dict)
    text["hidden_size"] = 64
    text["dsa_config"]["index_topk"] = 24
    return config


def small_folder(folder: Path) -> ModelShape:
    """A folder with first weights of a small shape, the mixes and biases moved off their flat start."""
    config = small_config()
    shape = parse_config(config).shape
    (folder / "config.json").write_text(json.dumps(config))
    parameters = train_weights.start(shape, seed=3)
    random = torch.Generator().manual_seed(5)
    for name, value in parameters.items():
        if name.endswith(("res_proj.weight", "e_score_correction_bias")):
            value.copy_(torch.randn(value.shape, generator=random) * 0.1)
    train_weights.write(parameters, folder)
    return shape


def tables(layout: Layout, tokens: int) -> tuple[dict[str, np.ndarray[Any, Any]], int]:
    """Pages of one sequence, one after the other, and how many."""
    found, used = {}, 0
    for group in (*layout.paged, *layout.states):
        each = -(-tokens // group.page_tokens) if hasattr(group, "page_tokens") else 1
        count = len(group.layers) * each
        found[group.name] = np.arange(used, used + count, dtype=np.int32).reshape(-1, each)
        used += count
    return found, used


def test_the_training_forward_gives_the_logits_of_serving(tmp_path: Path) -> None:
    shape = small_folder(tmp_path)
    ids = torch.randint(0, shape.vocab, (TOKENS, ROWS), generator=torch.Generator().manual_seed(1))
    weights = train_weights.assemble(train_weights.read(shape, tmp_path), shape, torch.float32)
    with torch.no_grad():
        trained = Batch(shape, weights, ids, None, sparse=True).logits()
        dense = Batch(shape, weights, ids, None, sparse=False).logits()
    model = load_model(tmp_path, 32)
    for row in range(ROWS):
        pages, used = tables(model.layout, TOKENS)
        pool = DevicePool(model.layout, used, "cpu")
        pool.bytes.zero_()
        with torch.inference_mode():
            served = model.prefill(ids[:, row].contiguous(), 0, pages, pool, all_logits=True)
        assert (trained[:, row] - served).abs().max() < 2e-4 * served.abs().max()
        assert (dense[:, row] - served)[24:].abs().max() > 1e-3 * served.abs().max(), "the indexer leaves tokens out"


def test_rounding_in_training_is_the_packing_of_the_release() -> None:
    random = torch.Generator().manual_seed(2)
    w = torch.randn(3, 8, 64, generator=random) * torch.logspace(-6, 3, 24).view(3, 8, 1)
    w[0, 0] = 0.0
    w[1, 1, :16] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2)
    assert torch.equal(train_weights.rounded(w), mxfp4.unpack(*mxfp4.quantize(w)))


def test_a_written_folder_reads_back_as_the_same_weights(tmp_path: Path) -> None:
    shape = small_folder(tmp_path)
    again = tmp_path / "again"
    again.mkdir()
    first = train_weights.read(shape, tmp_path)
    train_weights.write(first, again)
    second = train_weights.read(shape, again)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def small_file(vocab: int) -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(9)
    file = {"check_docs_bytes": np.array(500)}
    for name, rows, length in (
        ("short", 12, 32),
        ("long", 5, 64),
        ("check_lessons", 3, 32),
        ("check_needles", 2, 64),
        ("check_docs", 3, 32),
    ):
        file[f"{name}_ids"] = random.integers(0, vocab, (rows, length)).astype(np.uint16)
        file[f"{name}_weights"] = random.choice([0, 1, 5, 10], (rows, length)).astype(np.uint8)
    return file


STAGES = (Stage("short", 4, 0.5), Stage("long", 2, 0.75), Stage("long", 2, 1.0, sparse=True))


def small_run(shape: ModelShape) -> Run:
    return Run(shape, train_weights.start(shape, 3), small_file(shape.vocab), STAGES, seed=11)


def test_a_run_resumed_from_its_checkpoint_ends_in_the_same_bits(tmp_path: Path) -> None:
    shape = parse_config(small_config()).shape
    whole = small_run(shape)
    for _ in whole.train(Clock(steps=8, seconds=None)):
        pass
    first, clock = small_run(shape), Clock(steps=8, seconds=None)
    for step in first.train(clock):
        if step == 5:
            first.save(tmp_path / "checkpoint", clock)
            break
    second, clock = small_run(shape), Clock(steps=8, seconds=None)
    second.load(tmp_path / "checkpoint", clock)
    assert list(second.train(clock)) == [6, 7, 8]
    assert all(torch.equal(whole.parameters[name], second.parameters[name]) for name in whole.parameters)
    moved = train_weights.start(shape, 3)
    still = [name for name in moved if torch.equal(moved[name], whole.parameters[name])]
    only_source = "model.layers.0.self_attention_res_"  # the first mix has one source: its query decides nothing
    assert [name for name in still if not name.startswith(only_source)] == []


def test_training_lowers_the_loss_and_the_checks_run(tmp_path: Path) -> None:
    shape = parse_config(small_config()).shape
    (tmp_path / "config.json").write_text(json.dumps(small_config()))
    run = small_run(shape)
    losses = []
    rows = load_rows(run.file, "short", 4, 11, torch.device("cpu"))
    step = TrainStep(shape, run.parameters, run.optimizer, rows.inputs, sparse=False)
    run.optimizer.rate.fill_(1.0)
    rows.take(0)
    for _ in range(12):
        step()
        losses.append(float(step.loss))
    assert losses[-1] < 0.7 * losses[0]
    finish(run, tmp_path)
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores.keys() == {"answers", "needles", "bits_per_byte", "expert_load"}
    assert 1.0 <= scores["expert_load"] <= shape.moe.experts / shape.moe.per_token


def test_unevenness_is_what_its_formula_says_row_by_row() -> None:
    shape = parse_config(small_config()).shape
    weights = train_weights.assemble(train_weights.start(shape, 3), shape, torch.float32)
    forward = Batch(shape, weights, torch.zeros(6, ROWS, dtype=torch.int64), None, sparse=False)
    scores = torch.rand(6 * ROWS, shape.moe.experts, generator=torch.Generator().manual_seed(4))
    taken = torch.zeros_like(scores).scatter_(1, scores.topk(shape.moe.per_token).indices, 1.0)
    wanted = 0.0
    for row in range(ROWS):
        for expert in range(shape.moe.experts):
            mine = range(row, 6 * ROWS, ROWS)
            load = sum(float(taken[i, expert]) for i in mine) * shape.moe.experts / shape.moe.per_token / 6
            wanted += load * sum(float(scores[i, expert] / scores[i].sum()) for i in mine) / 6 / ROWS
    assert abs(float(forward.unevenness(scores, taken)) - wanted) < 1e-5
    assert abs(float(forward.unevenness(torch.ones_like(scores), taken)) - 1.0) < 1e-5


def test_the_last_balance_evens_the_loads_and_moves_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = parse_config(small_config()).shape
    parameters = train_weights.start(shape, 3)
    random = torch.Generator().manual_seed(6)
    for bias in router_biases(parameters):
        bias.copy_(torch.randn(bias.shape, generator=random) * 0.05)
    before = {name: value.clone() for name, value in parameters.items()}
    file = small_file(shape.vocab)
    file["short_weights"][::2] = train_balance.PLAIN
    monkeypatch.setattr(train_balance, "ROUNDS", 2)
    train_balance.settle(shape, parameters, file, batch=12)
    moved = [name for name in before if not torch.equal(before[name], parameters[name])]
    assert moved == [name for name in before if name.endswith("e_score_correction_bias")]
    assert largest_load(shape, parameters, file) < 1.3 < largest_load(shape, before, file)


def largest_load(shape: ModelShape, parameters: train_weights.Parameters, file: Any) -> float:
    ids = torch.from_numpy(file["short_ids"].astype(np.int64)).t().contiguous()
    forward = Batch(shape, train_weights.assemble(parameters, shape, torch.float32), ids, None, sparse=False)
    with torch.no_grad():
        forward.hidden()
    return max(float(load.max() / load.mean()) for load in forward.found.loads)


def test_the_order_of_rows_is_a_function_of_the_seed() -> None:
    file = small_file(100)
    one, two, other = (load_rows(file, "short", 4, seed, torch.device("cpu")) for seed in (1, 1, 2))
    orders = [[rows.chosen(step).tolist() for step in range(6)] for rows in (one, two, other)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(row for rows in orders[0][:3] for row in rows) == list(range(12)), "a pass takes every row once"
    assert torch.equal(one.take(3).probes, two.take(3).probes)

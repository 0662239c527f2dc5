"""The prefill worker above an SSD: bytes come up while other prompts run, and every end gives back all."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from hash_model import HashModel, answer, config_of, job_of

from forebay.kvstore.arena import Arena
from forebay.workers.job import Holder
from forebay.workers.local import LocalPair
from forebay.workers.prefill import PrefillWorker

NORTH = Holder(name="north", epoch=3)


def above_ssd(folder, **changes):
    made = config_of(folder, **{"host_pages": 0, **changes})
    ssd = {"ssd_path": str(folder / "ssd"), "ssd_bytes": 16 << 20, "ssd_queue_bytes": 1 << 20}
    return replace(made, store=replace(made.store, **ssd))


def drained(worker):
    outcomes = []
    while worker.busy:
        outcomes += worker.step(0.0)
        for outcome in outcomes:
            worker.release_handoff(outcome.job_id)
    return {outcome.job_id: outcome for outcome in outcomes}


@pytest.fixture
def slow(tmp_path):
    """A worker with a prompt on the SSD, whose reads wait for `gate`."""
    arena = Arena(tmp_path, "test", 1 << 17)
    worker = PrefillWorker(HashModel(), above_ssd(tmp_path, device_pages=90), arena)
    for name, n_prompt, seed in (("target", 90, 1), ("filling", 150, 2)):
        assert worker.submit(job_of(name, n_prompt, seed=seed), NORTH, 0.0) is None
        drained(worker)
    log = worker.memory.ssd.log
    assert log.flush(30)
    gate, read = threading.Event(), log._read
    log._read = lambda place: gate.wait(30) and read(place)
    yield worker, gate
    gate.set()
    worker.memory.store.check()
    stats = worker.stats()
    assert (stats.jobs, stats.handoffs) == (0, 0)
    assert all(tier.leased_pages == 0 for tier in stats.store.tiers)
    worker.close()
    arena.close()


def test_others_run_while_bytes_come_up(slow):
    worker, gate = slow
    assert worker.submit(job_of("target", 90, seed=1), NORTH, 0.0) is None
    assert worker.submit(job_of("other", 30, seed=3), NORTH, 0.0) is None
    outcomes = [outcome for _ in range(9) for outcome in worker.step(0.0)]
    assert [outcome.job_id for outcome in outcomes] == ["other"]
    assert worker.busy, "it is to be stepped until its bytes are there"
    worker.release_handoff("other")
    gate.set()
    prefilled = drained(worker)["target"]
    assert prefilled.cached_tokens == 88
    assert prefilled.tier_tokens.get("ssd", 0) > 0
    assert prefilled.first.id == answer(job_of("target", 90, seed=1))[0]


@pytest.mark.parametrize("end", ["cancel", "holder", "deadline", "close"])
def test_whatever_ends_a_prompt_meanwhile_frees_its_pages(slow, end):
    worker, gate = slow
    assert worker.submit(job_of("target", 90, seed=1), NORTH, 0.0) is None
    assert worker.step(0.0) == []
    assert worker.memory.store.stats().tiers[2].leased_pages > 0
    if end == "cancel":
        worker.cancel("target")
    elif end == "holder":
        worker.release_holder(NORTH)
    elif end == "deadline":
        assert [failure.kind for failure in worker.step(1e6)] == ["deadline"]
    else:
        gate.set()
        worker.cancel("target")
        return
    assert not worker.busy
    gate.set()
    assert worker.submit(job_of("again", 90, seed=1), NORTH, 0.0) is None
    assert drained(worker)["again"].cached_tokens == 88


def test_a_segment_that_goes_meanwhile_is_a_cold_start(slow, tmp_path):
    worker, gate = slow
    assert worker.submit(job_of("target", 90, seed=1), NORTH, 0.0) is None
    assert worker.step(0.0) == []
    for path in tmp_path.rglob("*.segment"):
        path.unlink()
    gate.set()
    prefilled = drained(worker)["target"]
    assert (prefilled.cached_tokens, prefilled.miss) == (0, "corrupt")
    assert prefilled.first.id == answer(job_of("target", 90, seed=1))[0]


@pytest.mark.parametrize("write", ["write_back", "write_through", "selective"])
@pytest.mark.parametrize("host_pages", [0, 40])
def test_sessions_answer_as_without_any_store(tmp_path, host_pages, write):
    """Sessions that take turns, over restarts of the worker, on a device that holds one of them."""
    config = above_ssd(tmp_path, device_pages=100, host_pages=host_pages)
    config = replace(config, store=replace(config.store, ssd_write=write))
    rng, hits = np.random.default_rng(4), 0
    for _ in range(3):
        with LocalPair(HashModel(), config) as pair:
            for _ in range(12):
                job = job_of("turn", int(rng.integers(20, 140)), seed=int(rng.integers(5)), temperature=1.0)
                assert pair.run(job).ids == answer(job)
            hits += pair.prefill.stats().store.hit_tokens.get("ssd", 0)
            assert pair.prefill.memory.ssd_failure is None
    assert hits > 0

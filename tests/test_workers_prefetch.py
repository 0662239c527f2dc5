"""Hits of prompts that wait for their turn come up from slow tiers into the host; all else is as without."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from fake_pool import FakeClient, Objects
from hash_model import HashModel, answer, config_of, job_of

from forebay.kvstore import memory as memory_module
from forebay.kvstore.arena import Arena
from forebay.workers import bench_prefetch
from forebay.workers.job import Holder
from forebay.workers.local import LocalPair
from forebay.workers.prefill import PrefillWorker

NORTH = Holder(name="north", epoch=3)
TARGET = job_of("target", 90, seed=1)


def above_ssd(folder, **changes):
    """A device for one long prompt, or two short ones; a host that holds two, and of which prefetch may fill one."""
    made = config_of(folder, **{"device_pages": 90, "host_pages": 140, **changes})
    ssd = {"ssd_path": str(folder / "ssd"), "ssd_bytes": 16 << 20, "ssd_queue_bytes": 1 << 20}
    return replace(made, store=replace(made.store, **ssd, ssd_write="write_through"))


def drained(worker):
    outcomes = []
    while worker.busy:
        for outcome in worker.step(0.0):
            outcomes.append(outcome)
            worker.release_handoff(outcome.job_id)
    return {outcome.job_id: outcome for outcome in outcomes}


def compute(worker, *jobs):
    for job in jobs:
        assert worker.submit(job, NORTH, 0.0) is None
        drained(worker)


def restarted(config, arena, *jobs):
    """A worker that has these prompts on its SSD only."""
    worker = PrefillWorker(HashModel(), config, arena)
    compute(worker, *jobs)
    assert worker.memory.ssd.log.flush(30)
    worker.close()
    return PrefillWorker(HashModel(), config, arena)


@pytest.fixture
def queued(tmp_path):
    """TARGET lies on the SSD only, and waits behind a prompt that has taken the device; reads wait for `gate`."""
    with Arena(tmp_path, "test", 1 << 17) as arena:
        worker = restarted(above_ssd(tmp_path), arena, TARGET)
        log = worker.memory.ssd.log
        hit = worker.memory.lookup(worker.memory.store.chain(TARGET.ids), 90)
        assert (hit.tier_tokens, hit.state_tier) == ({"ssd": 88}, "ssd")
        gate, read = threading.Event(), log._read
        log._read = lambda place: gate.wait(30) and read(place)
        assert worker.submit(job_of("running", 140, seed=5), NORTH, 0.0) is None
        assert worker.step(0.0) == []
        assert worker.submit(replace(TARGET, priority=1), NORTH, 0.0) is None
        yield worker, gate
        gate.set()
        drained(worker)
        worker.memory.store.check()
        worker.memory.host.directory.check()
        stats = worker.stats()
        assert (stats.jobs, stats.handoffs) == (0, 0)
        assert all(tier.leased_pages == 0 for tier in stats.store.tiers)
        worker.close()


def until_there(worker):
    """Step while the first prompt runs, until the second one's hit is in the host."""
    ahead = worker._prompts["target"].ahead
    while not ahead.advance():
        ahead.wait(10)
    return ahead


def test_a_hit_comes_up_while_another_prompt_runs(queued):
    worker, gate = queued
    assert worker.step(0.0) == []
    gate.set()
    assert until_there(worker).total_bytes > 0
    assert worker.stats().store.tiers[0].leased_pages > 0, "the other still runs"
    outcomes = drained(worker)
    prefilled = outcomes["target"]
    assert (prefilled.cached_tokens, prefilled.tier_tokens) == (88, {"host": 88})
    assert prefilled.first.id == answer(TARGET)[0]
    assert outcomes["running"].first.id == answer(job_of("running", 140, seed=5))[0]
    stats = worker.stats().store
    assert stats.prefetched_bytes["ssd"] > 0
    assert "ssd" not in stats.restored_bytes
    assert stats.restore_s["host"] > 0


def test_what_has_not_come_is_read_at_its_turn(queued):
    worker, gate = queued
    outcomes = []
    while not outcomes:
        outcomes = worker.step(0.0)
    worker.release_handoff("running")
    assert worker._prompts["target"].ahead.coming
    while not worker._prompts["target"].opening:
        assert worker.step(0.0) == []
    assert not worker._prompts["target"].ahead.coming, "the device is read into now"
    gate.set()
    prefilled = drained(worker)["target"]
    assert (prefilled.cached_tokens, prefilled.first.id) == (88, answer(TARGET)[0])
    assert prefilled.tier_tokens == {"ssd": 88}


@pytest.mark.parametrize("end", ["cancel", "holder", "deadline"])
def test_whatever_ends_the_prompt_ends_its_reads(queued, end):
    worker, gate = queued
    assert worker.step(0.0) == []
    assert worker.stats().store.tiers[2].leased_pages > 0, "what is read stays until it was"
    if end == "cancel":
        worker.cancel("target")
    elif end == "holder":
        worker.release_holder(NORTH)
    else:
        assert {failure.kind for failure in worker.step(1e6)} == {"deadline"}
    assert worker.stats().store.tiers[2].leased_pages == 0
    worker.memory.store.check()
    worker.memory.host.directory.check()
    gate.set()
    drained(worker)
    compute(worker, replace(TARGET, id="again"))
    assert worker.stats().cached_tokens == 88


def test_wrong_bytes_are_found_at_the_turn_and_cost_a_miss(queued, tmp_path):
    worker, gate = queued
    assert worker.step(0.0) == []
    for path in tmp_path.rglob("*.segment"):
        path.unlink()
    gate.set()
    prefilled = drained(worker)["target"]
    assert (prefilled.cached_tokens, prefilled.miss) == (0, "corrupt")
    assert prefilled.first.id == answer(TARGET)[0]
    assert worker.stats().store.prefetched_bytes == {}


def test_a_disk_that_fails_ends_it(queued):
    worker, gate = queued
    assert worker.step(0.0) == []
    worker.memory.ssd.log._writer.fail("no such disk")
    gate.set()
    assert drained(worker)["target"].first.id == answer(TARGET)[0]


def test_it_comes_up_from_the_pool_too(tmp_path, monkeypatch):
    objects = Objects()
    monkeypatch.setattr(memory_module, "MooncakeClient", lambda address, config: FakeClient(objects))
    monkeypatch.setattr(memory_module, "load", lambda name: None)
    config = config_of(tmp_path, device_pages=90, host_pages=140)
    pool = {"pool": "mooncake://127.0.0.1:1", "pool_queue_bytes": 1 << 20, "pool_ask_s": 10.0}
    with Arena(tmp_path, "test", 1 << 17) as arena:
        for name in ("one", "other"):
            config = replace(config, store=replace(config.store, **pool, cluster=name))
            worker = PrefillWorker(HashModel(), config, arena)
            assert worker.memory.pool_tier.traffic.wait_joined(10)
            if name == "one":
                compute(worker, TARGET)
                assert worker.memory.pool_tier.traffic.flush(10)
                worker.close()
        assert worker.submit(job_of("running", 140, seed=5), NORTH, 0.0) is None
        while worker._prompts["running"].lease is None:
            worker.step(0.0)
        assert worker.submit(replace(TARGET, priority=1), NORTH, 0.0) is None
        worker.memory.wait(10)
        assert worker.step(0.0) == []
        until_there(worker)
        prefilled = drained(worker)["target"]
        assert (prefilled.cached_tokens, prefilled.tier_tokens) == (88, {"host": 88})
        assert prefilled.first.id == answer(TARGET)[0]
        assert worker.stats().store.prefetched_bytes["pool"] > 0
        worker.close()


def test_tokens_and_hits_are_those_without(tmp_path):
    """Queues of turns of sessions on a device that holds one of them: twice, with and without."""
    turns = 4
    told = []
    for prefetch_bytes in (0, 1 << 20):
        config = above_ssd(tmp_path / str(prefetch_bytes), device_pages=90, host_pages=60)
        rng, said = np.random.default_rng(4), []
        with LocalPair(HashModel(), replace(config, prefetch_bytes=prefetch_bytes, prefetch_prompts=2)) as pair:
            for turn in range(turns):
                sessions = rng.permutation(5)[:4]
                jobs = [
                    job_of(f"{turn} {seed}", int(rng.integers(90, 120)), seed=int(seed), max_tokens=2)
                    for seed in sessions
                ]
                jobs = [replace(job, priority=place) for place, job in enumerate(jobs)]
                for job, completion in zip(jobs, pair.run_all(jobs), strict=True):
                    assert completion.ids == answer(job)
                    said.append((completion.ids, completion.cached_tokens, completion.miss))
                assert pair.prefill.memory.ssd.log.flush(30)
            pair.prefill.memory.store.check()
            stats = pair.prefill.stats().store
            assert (stats.prefetched_bytes.get("ssd", 0) > 0) == bool(prefetch_bytes)
        told.append(said)
    assert told[0] == told[1]
    assert sum(cached > 0 for _, cached, _ in told[0]) > turns


def test_waiting_prompts_fill_no_more_of_the_host_than_they_may(tmp_path):
    config = above_ssd(tmp_path, host_pages=300)
    config = replace(config, prefetch_bytes=1 << 13, prefetch_prompts=2)
    with Arena(tmp_path, "test", 1 << 17) as arena:
        jobs = [job_of(f"job {seed}", 80, seed=seed) for seed in range(6)]
        worker = restarted(config, arena, *jobs)
        assert worker.submit(job_of("running", 140, seed=20), NORTH, 0.0) is None
        worker.step(0.0)
        for job in jobs:
            assert worker.submit(replace(job, priority=1), NORTH, 0.0) is None
        most = 0
        while worker.busy:
            for outcome in worker.step(0.0):
                worker.release_handoff(outcome.job_id)
            aheads = [p.ahead for p in worker._prompts.values() if p.ahead and not p.lease and not p.opening]
            assert sum(ahead.coming for ahead in aheads) <= 2
            most = max(most, sum(ahead.total_bytes for ahead in aheads))
            worker.memory.store.check()
        assert 0 < most <= 1 << 13
        worker.close()


def test_the_bench_measures_both(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_prefetch, "ROUNDS", 1)
    monkeypatch.setattr(bench_prefetch, "CHUNK_S", 0.001)
    rows = list(bench_prefetch.bench_prefetch(tmp_path, jobs=2, blocks=1))
    assert [row.unit for row in rows] == ["s", "s"]
    assert all(row.value > 0 and row.ratio > 0 for row in rows)

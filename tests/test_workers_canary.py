"""An idle worker compares a resume with a cold run, unseen by jobs, through whatever tier it lies in; plants fail."""

from dataclasses import replace

import pytest
from hash_model import HashModel, answer, config_of, job_of

from forebay.kvstore.arena import Arena
from forebay.workers.job import Holder
from forebay.workers.local import LocalPair
from forebay.workers.prefill import PrefillWorker
from forebay.workers.resume_plants import PLANTS, worker_with

NORTH = Holder(name="north", epoch=3)
EVERY_S = 10.0


@pytest.fixture
def make(tmp_path):
    """Makes workers that are due every EVERY_S, and closes them with nothing leased."""
    with Arena(tmp_path, "test", 1 << 17) as arena:
        made = []

        def worker(maker=PrefillWorker, **changes):
            config = config_of(tmp_path, **{"device_pages": 90, "host_pages": 140, "canary_s": EVERY_S, **changes})
            ssd = {"ssd_path": str(tmp_path / "ssd"), "ssd_bytes": 16 << 20, "ssd_queue_bytes": 1 << 20}
            made.append(maker(HashModel(), replace(config, store=replace(config.store, **ssd)), arena))
            return made[-1]

        yield worker
        for each in made:
            each.memory.store.check()
            assert all(tier.leased_pages == 0 for tier in each.stats().store.tiers)
            each.close()


def idle(worker, now):
    """As the loop does with a worker that has nothing to do: steps now and then, for a second."""
    for _ in range(12):
        assert worker.step(now) == []
        assert (worker.stats().jobs, worker.stats().queued_tokens) == (0, 0)


def run(worker, job):
    assert worker.submit(job, NORTH, 0.0) is None
    outcomes = []
    while not outcomes:
        outcomes = worker.step(0.0)
    worker.release_handoff(job.id)
    return outcomes[0]


def test_it_runs_when_it_is_due_and_counts_what_was_restored(make):
    worker = make()
    for now, passed, prefills in ((0.0, 0, 0), (9.9, 0, 0), (10.0, 0, 5), (19.9, 0, 5), (20.0, 1, 8), (30.0, 2, 11)):
        idle(worker, now)
        stats = worker.stats()
        assert (stats.canary_passed, stats.canary_failed, len(worker._model.prefills)) == (passed, 0, prefills)
    assert worker.stats().prompt_tokens == 0


def test_it_is_off_unless_asked_for(make):
    worker = make(canary_s=0.0)
    idle(worker, 1e9)
    assert worker._model.prefills == []


@pytest.mark.parametrize("tier", ["host", "ssd"])
def test_it_resumes_from_where_its_prompt_lies(make, tier):
    worker = make(host_pages=140 if tier == "host" else 0)
    idle(worker, 0.0)
    idle(worker, EVERY_S)
    for seed in range(3):
        run(worker, job_of(f"filling {seed}", 150, seed=seed))
    assert worker.memory.ssd.log.flush(30)
    before = worker.stats().store.restored_bytes.get(tier, 0)
    idle(worker, 2 * EVERY_S)
    while worker.busy:
        worker.step(2 * EVERY_S)
    idle(worker, 2 * EVERY_S)
    assert worker.stats().canary_passed == 1
    assert worker.stats().store.restored_bytes[tier] > before


@pytest.mark.parametrize("plant", PLANTS)
def test_a_plant_fails_it_once_and_for_all(make, plant, caplog):
    worker = make(worker_with(plant, HashModel().layout))
    for now in range(0, 100, 10):
        idle(worker, float(now))
    assert (worker.stats().canary_passed, worker.stats().canary_failed) == (0, 1)
    lines = [record.getMessage() for record in caplog.records if "canary" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith("canary failed: 12 of 13 tokens resumed from device, logits differ")


def test_a_job_that_comes_meanwhile_goes_next(make):
    worker = make()
    idle(worker, 0.0)
    assert worker.step(EVERY_S) == []
    assert worker.busy, "its first chunk is done, and another is to come"
    begun = len(worker._model.prefills)
    job = job_of("real", 30, seed=1)
    assert worker.submit(job, NORTH, EVERY_S) is None
    assert worker.stats().jobs == 1
    prefilled = run(worker, replace(job, id="next"))
    assert prefilled.first.id == answer(job)[0]
    starts = [start for start, _ in worker._model.prefills[begun:]]
    assert starts[0] == 0
    assert starts[:4] == [0, 8, 16, 24], "nothing of the canary's in between"
    worker.cancel("real")
    for now in (EVERY_S, 3 * EVERY_S, 5 * EVERY_S):
        idle(worker, now)
    assert worker.stats().canary_passed >= 1


def test_answers_are_as_without(tmp_path):
    config = replace(config_of(tmp_path), canary_s=1e-9)
    with LocalPair(HashModel(), config) as pair:
        for turn in range(4):
            job = job_of("turn", 20 + 17 * turn, seed=3, temperature=1.0)
            assert pair.run(job).ids == answer(job)
            pair.prefill.step(1.0 + turn)
        assert pair.prefill.stats().canary_failed == 0

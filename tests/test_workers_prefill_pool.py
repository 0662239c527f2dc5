"""The prefill worker above a cluster-wide pool: it takes over what others computed, and waits for no answer long."""

import time
from dataclasses import replace

import pytest
from fake_pool import FakeClient, Objects, pool_of
from hash_model import HashModel, answer, config_of, job_of

from forebay.kvstore import memory as memory_module
from forebay.kvstore.arena import Arena
from forebay.workers.job import Holder
from forebay.workers.local import LocalPair
from forebay.workers.prefill import PrefillWorker

NORTH = Holder(name="north", epoch=3)


def above_pool(folder, **changes):
    made = config_of(folder, host_pages=0)
    pool = {"pool": "mooncake://127.0.0.1:1", "pool_queue_bytes": 1 << 20, "pool_ask_s": 10.0, **changes}
    return replace(made, store=replace(made.store, **pool))


def joined(worker):
    assert worker.memory.pool_tier.traffic.wait_joined(10)
    return worker


def drained(worker):
    outcomes = []
    while worker.busy:
        outcomes += worker.step(0.0)
        for outcome in outcomes:
            worker.release_handoff(outcome.job_id)
    return {outcome.job_id: outcome for outcome in outcomes}


def test_sessions_move_between_workers(tmp_path):
    """Turns of sessions at one worker or another, each on a device for one of them; also while the pool ails."""
    objects = Objects()
    config = above_pool(tmp_path)
    config = replace(config, store=replace(config.store, device_bytes=100 * 128))
    hits = 0
    with pool_of(objects), LocalPair(HashModel(), config) as one, LocalPair(HashModel(), config) as other:
        for pair in (one, other):
            joined(pair.prefill)
        for turn in range(60):
            objects.away, objects.full = turn % 15 == 14, turn % 15 == 13
            pair = (one, other)[turn % 2]
            job = job_of("turn", 12 + 17 * (turn // 6), seed=turn % 3, temperature=1.0)
            completion = pair.run(job)
            assert completion.ids == answer(job)
            hits += completion.cached_tokens > 0
            assert pair.prefill.memory.pool_tier.traffic.flush(10)
    assert hits > 30
    for pair in (one, other):
        stats = pair.prefill.stats().store
        assert stats.hit_tokens["pool"] > 0
        assert stats.restored_bytes["pool"] > 0


@pytest.fixture
def asked(tmp_path):
    """A worker whose questions take `delay[0]` seconds, over a pool that has the prompt of seed 1."""
    objects, delay = Objects(), [0.0]

    class Slow(FakeClient):
        def exist(self, names):
            time.sleep(delay[0])
            return super().exist(names)

    with pytest.MonkeyPatch.context() as patch, Arena(tmp_path, "test", 1 << 17) as arena:
        patch.setattr(memory_module, "MooncakeClient", lambda address, config: Slow(objects))
        patch.setattr(memory_module, "load", lambda name: None)
        first = joined(PrefillWorker(HashModel(), above_pool(tmp_path), arena))
        assert first.submit(job_of("first", 90, seed=1), NORTH, 0.0) is None
        drained(first)
        assert first.memory.pool_tier.traffic.flush(10)
        first.close()
        made = []

        def make(**changes):
            made.append(joined(PrefillWorker(HashModel(), above_pool(tmp_path, **changes), arena)))
            return made[-1]

        yield make, delay
        for worker in made:
            worker.memory.store.check()
            worker.close()


def test_a_prompt_waits_for_the_answer_while_others_run(asked):
    make, delay = asked
    worker = make()
    assert worker.submit(job_of("other", 30, seed=3), NORTH, 0.0) is None
    worker.memory.wait(5)
    delay[0] = 0.3
    assert worker.submit(job_of("target", 90, seed=1), NORTH, 0.0) is None
    outcomes = [outcome for _ in range(9) for outcome in worker.step(0.0)]
    assert [outcome.job_id for outcome in outcomes] == ["other"]
    assert worker.busy, "it is to be stepped until the answer is there"
    prefilled = drained(worker)["target"]
    assert (prefilled.cached_tokens, prefilled.tier_tokens) == (88, {"pool": 88})
    assert prefilled.first.id == answer(job_of("target", 90, seed=1))[0]


def test_a_prompt_goes_cold_where_no_answer_comes_in_time(asked):
    make, delay = asked
    worker = make(pool_ask_s=0.05)
    delay[0] = 1.0
    started = time.monotonic()
    assert worker.submit(job_of("target", 90, seed=1), NORTH, 0.0) is None
    prefilled = drained(worker)["target"]
    assert time.monotonic() - started < 0.9
    assert prefilled.cached_tokens == 0
    assert prefilled.first.id == answer(job_of("target", 90, seed=1))[0]

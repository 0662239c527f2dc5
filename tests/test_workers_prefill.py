"""The prefill worker: queue, order, grid, handoffs, and that every end gives back all."""

from dataclasses import replace

import numpy as np
import pytest
from hash_model import HashModel, answer, config_of, job_of

from forebay.kvstore.arena import Arena
from forebay.workers.job import Failure, Holder
from forebay.workers.outcome import Prefilled
from forebay.workers.prefill import PrefillWorker

NORTH = Holder(name="north", epoch=3)


@pytest.fixture
def make(tmp_path):
    """make(**config) -> worker. At the end nothing may be leased, queued or kept."""
    made = []

    def maker(*, arena_bytes=1 << 17, **changes):
        arena = Arena(tmp_path, "test", arena_bytes)
        made.append((PrefillWorker(HashModel(), config_of(tmp_path, **changes), arena), arena))
        return made[-1][0]

    yield maker
    for worker, arena in made:
        assert nothing_held(worker)
        worker.close()
        arena.close()


def nothing_held(worker):
    worker.memory.store.check()
    stats = worker.stats()
    leased = sum(tier.leased_pages for tier in stats.store.tiers)
    return (stats.jobs, stats.handoffs, stats.handoff_bytes, leased) == (0, 0, 0, 0)


def chunks(worker):
    return worker._model.prefills


def until_idle(worker, now=0.0, *, release=True):
    outcomes = []
    while worker.busy:
        outcomes += worker.step(now)
        assert len(chunks(worker)) < 1000
    for outcome in outcomes:
        if release:
            worker.release_handoff(outcome.job_id)
    return {outcome.job_id: outcome for outcome in outcomes}


def test_a_full_queue_answers_at_once(make):
    worker = make(queue_jobs=2)
    for name in ("a", "b"):
        assert worker.submit(job_of(name, 9), NORTH, 0.0) is None
    assert worker.submit(job_of("c", 9), NORTH, 0.0).kind == "overloaded"
    assert set(until_idle(worker)) == {"a", "b"}
    assert worker.submit(job_of("c", 9), NORTH, 0.0) is None
    until_idle(worker)


def test_bad_and_repeated_jobs_are_named(make):
    worker = make()
    bad = replace(job_of("bad", 5), ids=np.array([1, 2, 3, 4, 99], np.int32))
    assert worker.submit(bad, NORTH, 0.0).message.startswith("ids: ")
    assert worker.submit(job_of("a", 9), NORTH, 0.0) is None
    assert worker.submit(job_of("a", 9), NORTH, 0.0).kind == "invalid"
    until_idle(worker)


def test_chunks_end_on_the_grid_at_checkpoints_and_at_the_prompt_end(make):
    worker = make(chunk_tokens=8, checkpoints="prompt_end+interval:12")
    worker.submit(job_of("a", 30), NORTH, 0.0)
    until_idle(worker)
    assert chunks(worker) == [(0, 8), (8, 12), (12, 16), (16, 24), (24, 28), (28, 30)]
    worker.submit(job_of("b", 33), NORTH, 0.0)
    assert until_idle(worker)["b"].cached_tokens == 28
    assert chunks(worker)[6:] == [(28, 32), (32, 33)]


def test_the_second_of_two_like_prompts_waits_and_hits_what_the_first_committed(make):
    worker = make()
    worker.submit(job_of("a", 30), NORTH, 0.0)
    worker.submit(job_of("b", 30), NORTH, 0.0)
    outcomes = until_idle(worker)
    assert (outcomes["a"].cached_tokens, outcomes["b"].cached_tokens) == (0, 28)
    assert outcomes["a"].first == outcomes["b"].first
    assert outcomes["b"].computed_tokens == 2
    stats = worker.stats()
    assert (stats.prompt_tokens, stats.cached_tokens, stats.computed_tokens) == (60, 28, 32)


def test_a_short_prompt_passes_a_long_one_between_two_chunks(make):
    worker = make(device_pages=300)
    worker.submit(job_of("long", 200), NORTH, 0.0)
    worker.step(0.0)
    worker.submit(job_of("short", 6, seed=5), NORTH, 0.0)
    ended = worker.step(0.0) + worker.step(0.0)
    assert [outcome.job_id for outcome in ended] == ["short"]
    assert set(until_idle(worker)) == {"long"}
    worker.release_handoff("short")


def test_priority_goes_first(make):
    worker = make()
    worker.submit(replace(job_of("batch", 5), priority=2), NORTH, 0.0)
    worker.submit(replace(job_of("chat", 60, seed=1), priority=0), NORTH, 0.0)
    assert list(until_idle(worker)) == ["chat", "batch"]


def test_who_does_not_fit_now_waits_and_nobody_is_admitted_past_it(make):
    worker = make(device_pages=48, host_pages=0)
    worker.submit(replace(job_of("half", 60), priority=2), NORTH, 0.0)  # 16 + 8 + 5 pages
    worker.step(0.0)
    worker.submit(job_of("most", 50, seed=1), NORTH, 0.0)  # 14 + 8 + 5 pages
    worker.submit(replace(job_of("small", 9, seed=2), priority=1), NORTH, 0.0)  # 4 + 2 + 5 pages: would fit
    assert list(until_idle(worker)) == ["half", "most", "small"]


def test_rows_that_were_never_computed_never_match(make):
    worker = make()
    worker.submit(job_of("a", 40), NORTH, 0.0)
    worker.step(0.0)
    worker.cancel("a")
    for cached in (0, 36):
        worker.submit(job_of("a", 40), NORTH, 0.0)
        outcome = until_idle(worker)["a"]
        assert (outcome.first.id, outcome.cached_tokens) == (answer(job_of("a", 40))[0], cached)


def test_who_can_never_fit_is_refused(make):
    worker = make(device_pages=48)
    worker.submit(job_of("huge", 150), NORTH, 0.0)
    worker.submit(job_of("a", 9), NORTH, 0.0)
    outcomes = until_idle(worker)
    assert outcomes["huge"].kind == "invalid"
    assert outcomes["huge"].message.startswith("n_prompt: ")
    assert isinstance(outcomes["a"], Prefilled)


def test_a_full_arena_holds_the_next_handoff_back(make):
    worker = make(arena_bytes=3000)
    worker.submit(job_of("a", 40), NORTH, 0.0)
    worker.submit(job_of("b", 40, seed=1), NORTH, 0.0)
    ended = [outcome for _ in range(20) for outcome in worker.step(0.0)]
    assert [outcome.job_id for outcome in ended] == ["a"]
    assert not worker.busy
    assert worker.stats().jobs == 1
    worker.release_handoff("a")
    assert worker.busy
    assert list(until_idle(worker)) == ["b"]


def test_a_handoff_that_exceeds_the_arena_is_refused(make):
    worker = make(arena_bytes=1000)
    worker.submit(job_of("a", 80), NORTH, 0.0)
    assert until_idle(worker)["a"].kind == "invalid"


def test_a_handoff_stays_until_its_time_is_up(make):
    worker = make(handoff_timeout_s=10.0)
    worker.submit(job_of("a", 9), NORTH, 0.0)
    until_idle(worker, now=1.0, release=False)
    worker.step(10.9)
    assert worker.stats().handoffs == 1
    worker.step(11.0)
    assert worker.stats().handoffs == 0


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_deadline_passes(make, steps):
    worker = make()
    worker.submit(replace(job_of("a", 40), timeout_s=5.0), NORTH, 1.0)
    for _ in range(steps):
        assert worker.step(5.9) == []
    assert [outcome.kind for outcome in worker.step(6.0)] == ["deadline"]
    assert nothing_held(worker)


@pytest.mark.parametrize("steps", [0, 1, 3, 99])
def test_cancel_gives_all_back_at_any_stage(make, steps):
    worker = make()
    worker.submit(job_of("a", 40), NORTH, 0.0)
    for _ in range(steps):
        worker.step(0.0)
    worker.cancel("a")
    worker.cancel("a")
    assert nothing_held(worker)
    assert worker.step(0.0) == []


def test_a_holder_takes_its_older_epochs_with_it(make):
    worker = make()
    old, new, other = replace(NORTH, epoch=2), replace(NORTH, epoch=4), Holder(name="south", epoch=1)
    for name, holder in (("old", old), ("now", NORTH), ("new", new), ("other", other)):
        worker.submit(job_of(name, 9), holder, 0.0)
    until_idle(worker, release=False)
    worker.submit(job_of("queued", 9), NORTH, 0.0)
    worker.release_holder(NORTH)
    assert not worker.busy
    assert worker.stats().handoffs == 2
    worker.release_holder(new)
    worker.release_holder(other)


def test_forced_tokens_leave_the_first_token_to_decode(make):
    worker = make()
    job = job_of("a", 9)
    forced = replace(job, ids=np.append(job.ids, np.int32(answer(job)[0])))
    worker.submit(forced, NORTH, 0.0)
    outcome = until_idle(worker)["a"]
    assert outcome.first is None
    assert outcome.handoff.n_tokens == 9


def test_wrong_bytes_in_the_host_tier_are_a_miss(make):
    worker = make(device_pages=44, host_pages=200)
    jobs = [job_of(name, 60, seed=seed) for seed, name in enumerate("ab")]
    for job in jobs:
        worker.submit(job, NORTH, 0.0)
        first = until_idle(worker)[job.id].first
        assert first.id == answer(job)[0]
    worker.memory.host.directory.table.granules[:] ^= 1
    worker.submit(jobs[0], NORTH, 0.0)
    outcome = until_idle(worker)["a"]
    assert not isinstance(outcome, Failure)
    assert outcome.first.id == answer(jobs[0])[0]
    assert outcome.cached_tokens < 56


def test_the_first_choice_of_a_turn_is_what_the_store_learns_from(make):
    worker = make(device_pages=300)
    history = worker.memory.store._tiers.history
    job = replace(job_of("a", 33), session="s", stop="end_turn", class_name="agent")
    for now, again in ((10.0, job), (11.0, replace(job, id="b", choice=1)), (40.0, replace(job, id="c"))):
        worker.submit(again, NORTH, now)
        until_idle(worker, now)
        if again is job:
            worker.turn_ended("s", "tool_use")
            after_the_call = {part.stay.kind for part in history._row_parts.values()}
    assert history.now == 40.0
    assert {part.uses for part in history._row_parts.values()} == {2}
    assert {part.stay.kind for part in history._row_parts.values()}.isdisjoint(after_the_call)


def test_a_session_that_lands_on_another_worker_of_its_cluster_hits_the_host(make):
    """Two workers of one cluster: what the first pushed out of its device, the second restores for the next turn."""
    one, other = (make(device_pages=41, host_pages=200) for _ in range(2))
    for seed, n_prompt in enumerate((60, 96)):
        one.submit(job_of("earlier", n_prompt, seed=seed), NORTH, 0.0)
        until_idle(one)
    turn = job_of("second turn", 70, seed=0)
    assert other.submit(turn, NORTH, 0.0) is None
    prefilled = until_idle(other)["second turn"]
    assert prefilled.tier_tokens == {"host": 60}
    assert (prefilled.cached_tokens, prefilled.computed_tokens) == (60, 10)
    assert prefilled.first.id == answer(turn)[0]


def test_a_worker_that_takes_a_dead_ones_place_finds_its_host_tier(make, monkeypatch):
    one = make(device_pages=41, host_pages=200)
    for seed, n_prompt in enumerate((60, 96)):
        one.submit(job_of("earlier", n_prompt, seed=seed), NORTH, 0.0)
        until_idle(one)
    monkeypatch.setattr(one.memory.host, "close", lambda: None)
    replacement = make(device_pages=41, host_pages=200)
    job = job_of("again", 60, seed=0)
    replacement.submit(job, NORTH, 0.0)
    prefilled = until_idle(replacement)["again"]
    assert prefilled.tier_tokens == {"host": prefilled.cached_tokens}
    assert prefilled.first.id == answer(job)[0]

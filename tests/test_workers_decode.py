"""The decode worker: slots and pages, continuous batching, preemption, and that every end gives back all."""

from dataclasses import replace

import numpy as np
import pytest
from hash_model import HashModel, answer, config_of, job_of

from forebay.kvstore.arena import Arena
from forebay.workers.decode import DecodeWorker
from forebay.workers.job import Failure, Holder
from forebay.workers.outcome import Emitted
from forebay.workers.prefill import PrefillWorker

NORTH = Holder(name="north", epoch=3)


class Stand:
    """A decode worker and what feeds it."""

    def __init__(self, run_dir, **changes):
        self.arena = Arena(run_dir, "test", 1 << 18)
        self.prefill = PrefillWorker(HashModel(), config_of(run_dir, device_pages=300), self.arena)
        self.decode = DecodeWorker(HashModel(), config_of(run_dir, host_pages=0, **changes))

    def prefilled(self, job):
        assert self.prefill.submit(job, NORTH, 0.0) is None
        while True:
            for outcome in self.prefill.step(0.0):
                return outcome

    def start(self, job, holder=NORTH, now=0.0):
        assert self.decode.reserve(job.id, holder, len(job.ids), now) is None
        failure = self.decode.start(job, self.prefilled(job), holder, now)
        self.prefill.release_handoff(job.id)
        return failure

    def free(self):
        self.decode.memory.store.check()
        stats = self.decode.stats()
        return stats.slots_used == 0 and all(tier.leased_pages == 0 for tier in stats.store.tiers)


@pytest.fixture
def make(tmp_path):
    stands = []

    def maker(**changes):
        stands.append(Stand(tmp_path, **changes))
        return stands[-1]

    yield maker
    for stand in stands:
        assert stand.free()
        stand.decode.close()
        stand.prefill.close()
        stand.arena.close()


def run(stand, now=0.0):
    """(tokens by job, how jobs ended) of steps until nothing runs."""
    tokens, ends = {}, {}
    while stand.decode.busy:
        for outcome in stand.decode.step(now):
            if isinstance(outcome, Failure):
                ends[outcome.job_id] = outcome.kind
                continue
            tokens.setdefault(outcome.job_id, []).extend(token.id for token in outcome.tokens)
            if outcome.finish:
                ends[outcome.job_id] = outcome.finish
    return tokens, ends


def test_the_first_token_leaves_before_the_next_is_computed(make):
    stand = make()
    job = job_of("a", 9)
    assert stand.start(job) is None
    first = stand.decode.step(0.0)
    assert [(e.job_id, [t.id for t in e.tokens], e.finish) for e in first] == [("a", [answer(job)[0]], None)]
    assert stand.decode.stats().steps == 0
    tokens, ends = run(stand)
    assert tokens["a"] == list(answer(job)[1:])
    assert ends == {"a": "length"}


def test_sequences_join_and_leave_a_running_batch(make):
    stand = make(device_pages=300)
    jobs = [job_of(f"j{i}", 4 + 9 * i, temperature=i % 2, max_tokens=3 + 4 * i) for i in range(5)]
    tokens = {job.id: [] for job in jobs}
    for job in jobs:
        assert stand.start(job) is None
        for _ in range(3):
            for emitted in stand.decode.step(0.0):
                tokens[emitted.job_id] += [token.id for token in emitted.tokens]
    rest, _ = run(stand)
    assert {job.id: tokens[job.id] + rest.get(job.id, []) for job in jobs} == {j.id: list(answer(j)) for j in jobs}


def test_one_token_may_be_the_whole_answer(make):
    stand = make()
    job = job_of("a", 9, max_tokens=1)
    stand.start(job)
    assert run(stand) == ({"a": list(answer(job))}, {"a": "length"})
    assert stand.decode.stats().steps == 0


def test_slots_are_counted_from_the_reservation_on(make):
    stand = make(slots=2)
    assert stand.decode.reserve("a", NORTH, 9, 0.0) is None
    assert stand.decode.reserve("a", NORTH, 9, 0.0).kind == "invalid"
    assert stand.decode.reserve("b", NORTH, 9, 0.0) is None
    assert stand.decode.reserve("c", NORTH, 9, 0.0).kind == "overloaded"
    stand.decode.cancel("a")
    assert stand.decode.reserve("c", NORTH, 9, 0.0) is None
    stand.decode.release_holder(NORTH)


def test_pages_are_promised_with_the_slot(make):
    stand = make(device_pages=40)
    assert stand.decode.reserve("huge", NORTH, 300, 0.0).kind == "invalid"
    assert stand.decode.reserve("a", NORTH, 60, 0.0) is None
    assert stand.decode.reserve("b", NORTH, 60, 0.0).kind == "overloaded"
    stand.decode.cancel("a")


def test_a_reservation_times_out(make):
    stand = make(reservation_timeout_s=5.0)
    job = job_of("a", 9)
    stand.decode.reserve("a", NORTH, 9, 0.0)
    assert stand.decode.step(5.0) == []
    assert stand.free()
    failure = stand.decode.start(job, stand.prefilled(job), NORTH, 5.1)
    assert failure.kind == "overloaded"
    stand.prefill.release_handoff("a")


def test_a_foreign_slot_is_not_taken(make):
    stand = make()
    job = job_of("a", 9)
    stand.decode.reserve("a", Holder(name="south", epoch=1), 9, 0.0)
    assert stand.decode.start(job, stand.prefilled(job), NORTH, 0.0).kind == "overloaded"
    stand.decode.cancel("a")


@pytest.mark.parametrize("fault", ["released", "flipped", "other prompt", "no first token"])
def test_a_bad_handoff_fails_and_frees_the_slot(make, fault):
    stand = make()
    job = job_of("a", 21)
    stand.decode.reserve("a", NORTH, 21, 0.0)
    prefilled = stand.prefilled(job)
    if fault == "released":
        stand.arena.close()
    elif fault == "flipped":
        stand.arena.bytes[prefilled.handoff.pieces[-1].offset + 5] ^= 16
    elif fault == "other prompt":
        prefilled = replace(prefilled, handoff=replace(prefilled.handoff, n_tokens=20))
    else:
        prefilled = replace(prefilled, first=None)
    failure = stand.decode.start(job, prefilled, NORTH, 0.0)
    assert failure.kind == "handoff"
    assert stand.free()


def test_an_answer_that_can_never_fit_is_refused(make):
    stand = make(device_pages=40)
    failure = stand.start(job_of("a", 9, max_tokens=150))
    assert (failure.kind, failure.message.split(":")[0]) == ("invalid", "max_tokens")


def test_more_forced_tokens_than_reserved_grow_the_lease(make):
    stand = make()
    job = job_of("a", 9, max_tokens=30)
    forced = replace(job, ids=np.append(job.ids, np.array(answer(job)[:25], np.int32)))
    stand.decode.reserve("a", NORTH, 9, 0.0)
    assert stand.decode.start(forced, stand.prefilled(forced), NORTH, 0.0) is None
    stand.prefill.release_handoff("a")
    assert run(stand)[0]["a"] == list(answer(job)[25:])


def test_used_up_pages_preempt_the_newest_of_the_lowest_priority(make):
    stand = make(device_pages=60)
    jobs = [job_of(name, 6, max_tokens=60) for name in ("old", "new", "batch")]
    for job in jobs:
        assert stand.start(replace(job, priority=int(job.id == "batch"))) is None
    tokens, ends = run(stand)
    assert ends == {"old": "length", "new": "preempted", "batch": "preempted"}
    assert len(tokens["batch"]) < len(tokens["new"])
    for job in jobs:
        assert tokens[job.id] == list(answer(job))[: len(tokens[job.id])]
    assert stand.decode.stats().preemptions == 2


def test_a_deadline_passes_while_decoding(make):
    stand = make()
    stand.start(replace(job_of("a", 9, max_tokens=50), timeout_s=4.0), now=1.0)
    stand.start(job_of("b", 9, max_tokens=8))
    assert all(isinstance(outcome, Emitted) for outcome in stand.decode.step(4.9))
    tokens, ends = run(stand, now=5.0)
    assert ends == {"a": "deadline", "b": "length"}
    assert len(tokens["b"]) == 7


def test_cancel_and_a_holder_end_running_sequences(make):
    stand = make()
    other = Holder(name="south", epoch=1)
    for name, holder in (("a", NORTH), ("b", NORTH), ("c", other)):
        stand.start(job_of(name, 9), holder)
    stand.decode.step(0.0)
    stand.decode.cancel("a")
    stand.decode.release_holder(replace(NORTH, epoch=2))
    assert stand.decode.stats().jobs == 2
    stand.decode.release_holder(replace(NORTH, epoch=9))
    assert set(run(stand)[1]) == {"c"}


def test_logprobs_come_with_every_token(make):
    stand = make()
    job = job_of("a", 9, temperature=1.0)
    stand.start(replace(job, sampling=replace(job.sampling, logprobs=2)))
    seen = [token for _ in range(6) for emitted in stand.decode.step(0.0) for token in emitted.tokens]
    assert [token.id for token in seen] == list(answer(job))
    assert all(token.logprob < 0 and len(token.top) == 2 for token in seen)

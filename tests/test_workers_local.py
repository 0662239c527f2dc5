"""Both workers on the model of hashes: any history gives the tokens of a run without pages, and gives all back."""

from dataclasses import replace

import numpy as np
import pytest
from hash_model import HashModel, answer, config_of, job_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forebay.kvstore.arena import Arena
from forebay.workers.decode import DecodeWorker
from forebay.workers.job import Failure, Holder
from forebay.workers.local import Completion, LocalPair
from forebay.workers.outcome import Emitted, Prefilled
from forebay.workers.prefill import PrefillWorker


@pytest.fixture
def pair(tmp_path):
    with LocalPair(HashModel(), config_of(tmp_path)) as pair:
        yield pair
        nothing_held(pair.prefill, pair.decode)


def nothing_held(prefill, decode):
    for worker in (prefill, decode):
        worker.memory.store.check()
        stats = worker.stats()
        assert (stats.jobs, stats.slots_used, stats.handoffs, stats.handoff_bytes) == (0, 0, 0, 0)
        assert all(tier.leased_pages == 0 for tier in stats.store.tiers)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("n_prompt", [1, 3, 4, 5, 8, 31, 32, 33, 90])
def test_tokens_are_those_of_a_run_without_pages_cold_and_warm(pair, n_prompt, temperature):
    job = job_of("a", n_prompt, temperature=temperature)
    for cached in (0, (n_prompt - 1) // 4 * 4):
        completion = pair.run(job)
        assert completion.ids == answer(job)
        assert (completion.finish, completion.cached_tokens) == ("length", cached)
        assert completion.computed_tokens == n_prompt - cached


def test_all_at_once_each_gets_the_tokens_it_gets_alone(pair):
    jobs = [job_of(f"job {i}", 5 + 7 * i, temperature=i % 2, max_tokens=3 + i) for i in range(9)]
    completions = pair.run_all(jobs)
    assert [completion.ids for completion in completions] == [answer(job) for job in jobs]


def test_preempted_jobs_are_resubmitted_and_say_the_same(tmp_path):
    config = config_of(tmp_path, device_pages=40)
    jobs = [job_of(f"job {i}", 6, temperature=1.0, max_tokens=50) for i in range(4)]
    with LocalPair(HashModel(), config) as pair:
        completions = pair.run_all(jobs)
        assert pair.decode.stats().preemptions > 0
        nothing_held(pair.prefill, pair.decode)
    assert [completion.ids for completion in completions] == [answer(job) for job in jobs]


def test_forced_tokens_go_through_decode_steps_and_are_not_said_again(pair):
    job = job_of("a", 10, temperature=1.0, max_tokens=9)
    whole = answer(job)
    for kept in range(1, 9):
        forced = replace(job, ids=np.concatenate([job.ids, np.array(whole[:kept], np.int32)]))
        assert pair.run(forced).ids == whole[kept:]
    assert (
        answer(replace(job, ids=forced.ids, n_prompt=18)) != whole[8:]
    )  # prefilled, they would have made other tokens


def test_a_job_that_had_said_all_ends_at_once(pair):
    job = job_of("a", 10, max_tokens=4)
    said = replace(job, ids=np.concatenate([job.ids, np.array(answer(job), np.int32)]))
    completion = pair.run(said)
    assert (completion.ids, completion.finish) == ((), "length")


def test_stop_ids_end_it_and_min_tokens_bars_them(pair):
    job = job_of("a", 10, temperature=1.0, max_tokens=20)
    plain = answer(job)
    stop = plain[5]
    first = plain.index(stop)
    stopped = pair.run(replace(job, sampling=replace(job.sampling, stop_ids=(stop,))))
    assert (stopped.ids, stopped.finish) == (plain[: first + 1], "stop")
    longer = replace(job, sampling=replace(job.sampling, stop_ids=(stop,), min_tokens=first + 2))
    completion = pair.run(longer)
    assert completion.ids == answer(longer)
    assert stop not in completion.ids[: first + 1]


def test_what_a_turn_generated_is_prefilled_by_the_next(pair):
    ids, held = job_of("a", 13).ids, 0
    for turn in range(4):
        job = replace(job_of(f"turn {turn}", 1, temperature=1.0), ids=ids, n_prompt=len(ids))
        completion = pair.run(job)
        assert completion.ids == answer(job)
        assert completion.cached_tokens == held
        held = len(ids) // 4 * 4
        ids = np.concatenate([ids, np.array(completion.ids, np.int32), job_of(f"said {turn}", 6).ids])


def test_a_job_too_large_for_either_pool_is_refused(tmp_path):
    with LocalPair(HashModel(), config_of(tmp_path, device_pages=40)) as pair:
        jobs = [job_of("ok", 5), job_of("long prompt", 200), job_of("long answer", 5, max_tokens=200)]
        fits, long_prompt, long_answer = pair.run_all(jobs)
        nothing_held(pair.prefill, pair.decode)
    assert isinstance(fits, Completion)
    assert (long_prompt.kind, long_answer.kind) == ("invalid", "invalid")
    assert long_prompt.message.startswith("n_prompt: ")
    assert long_answer.message.startswith("max_tokens: ")


HOLDERS = [Holder(name=name, epoch=1) for name in ("north", "south")]


class Workers(RuleBasedStateMachine):
    """Random submits, steps, cancels, deaths of holders, deadlines and lost handoffs, against runs without pages."""

    @initialize(small=st.booleans())
    def start(self, small):
        self.arena = Arena(self.run_dir, "machine", 1 << 16)
        config = config_of(self.run_dir, device_pages=48 if small else 160, host_pages=20, slots=4, queue_jobs=5)
        self.prefill, self.decode = PrefillWorker(HashModel(), config, self.arena), DecodeWorker(HashModel(), config)
        self.now, self.count = 0.0, 0
        self.jobs, self.holders, self.said, self.waiting = {}, {}, {}, {}

    @rule(
        prefix=st.integers(0, 2),
        n_prompt=st.integers(1, 40),
        forced=st.integers(0, 3),
        temperature=st.sampled_from([0.0, 1.0]),
        priority=st.integers(0, 2),
        timeout_s=st.sampled_from([1.0, 30.0]),
        holder=st.sampled_from(HOLDERS),
    )
    def submit(self, prefix, n_prompt, forced, temperature, priority, timeout_s, holder):
        self.count += 1
        job = job_of(f"j{self.count}", n_prompt, temperature=temperature, max_tokens=7, seed=prefix)
        job = replace(job, priority=priority, timeout_s=timeout_s)
        job = replace(job, ids=np.concatenate([job.ids, np.array(answer(job)[:forced], np.int32)]))
        if self.decode.reserve(job.id, holder, len(job.ids), self.now) is not None:
            return
        if self.prefill.submit(job, holder, self.now) is not None:
            self.decode.cancel(job.id)
            return
        self.jobs[job.id], self.holders[job.id], self.said[job.id] = job, holder, list(answer(job)[:forced])

    @rule()
    def step_prefill(self):
        for outcome in self.prefill.step(self.now):
            if isinstance(outcome, Failure):
                assert outcome.kind in ("deadline", "invalid")
                self.forget(outcome.job_id)
            else:
                self.waiting[outcome.job_id] = outcome

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), lost=st.booleans())
    def hand_over(self, data, lost):
        job_id = data.draw(st.sampled_from(sorted(self.waiting)))
        prefilled: Prefilled = self.waiting.pop(job_id)
        if lost:
            self.prefill.release_handoff(job_id)
        failure = self.decode.start(self.jobs[job_id], prefilled, self.holders[job_id], self.now)
        self.prefill.release_handoff(job_id)
        if failure is not None:
            self.forget(job_id)

    @rule()
    def step_decode(self):
        for outcome in self.decode.step(self.now):
            if isinstance(outcome, Emitted):
                self.hear(outcome)
            else:
                assert outcome.kind in ("deadline", "preempted")
                self.forget(outcome.job_id)

    def hear(self, emitted):
        said, job = self.said[emitted.job_id], self.jobs[emitted.job_id]
        said += [token.id for token in emitted.tokens]
        assert said == list(answer(job))[: len(said)]
        assert (emitted.finish == "length") == (len(said) == job.sampling.max_tokens)
        if emitted.finish:
            self.forget(emitted.job_id)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data):
        self.forget(data.draw(st.sampled_from(sorted(self.jobs))))

    @rule(seconds=st.sampled_from([0.3, 2.0]))
    def pass_time(self, seconds):
        self.now += seconds

    @rule(holder=st.sampled_from(HOLDERS))
    def holder_dies(self, holder):
        self.prefill.release_holder(holder)
        self.decode.release_holder(holder)
        for job_id in [job_id for job_id, owner in self.holders.items() if owner == holder]:
            self.forget(job_id)

    def forget(self, job_id):
        self.prefill.cancel(job_id)
        self.decode.cancel(job_id)
        for known in (self.jobs, self.holders, self.said, self.waiting):
            known.pop(job_id, None)

    @invariant()
    def accounts_add_up(self):
        for worker in (self.prefill, self.decode) if self.count else ():
            worker.memory.store.check()
            if not self.jobs:
                assert all(tier.leased_pages == 0 for tier in worker.stats().store.tiers)

    def teardown(self):
        for holder in HOLDERS:
            self.holder_dies(holder)
        nothing_held(self.prefill, self.decode)
        self.prefill.close()
        self.arena.close()


def test_random_histories(tmp_path, examples):
    machine = type("RandomWorkers", (Workers,), {"run_dir": str(tmp_path)})
    machine.TestCase.settings = settings(max_examples=examples(300), stateful_step_count=40, deadline=None)
    case = machine.TestCase()
    case.settings = machine.TestCase.settings
    case.runTest()

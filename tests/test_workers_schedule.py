"""The schedulers are pure: orders, chunk ends and victims from plain values."""

from hypothesis import given
from hypothesis import strategies as st

from forebay.workers.schedule import (
    PrefillCandidate,
    Queued,
    RunningSequence,
    chunk_end,
    next_ahead,
    prefill_order,
    victim,
)


def candidate(name, remaining, *, priority=0, waited=0.0, arrival=0):
    return PrefillCandidate(
        job_id=name, priority=priority, remaining_tokens=remaining, waited_s=waited, arrival=arrival
    )


def first(candidates, ageing=100.0):
    return prefill_order(candidates, ageing)[0].job_id


def test_priority_goes_before_length_and_age():
    assert first([candidate("batch", 1, priority=1, waited=1e6), candidate("chat", 9999)]) == "chat"


def test_a_short_job_passes_a_long_one_until_waiting_has_earned_the_difference():
    short = candidate("short", 100)
    assert first([candidate("long", 1100, waited=9.0), short]) == "short"
    assert first([candidate("long", 1100, waited=11.0), short]) == "long"


def test_equal_jobs_go_by_arrival():
    assert first([candidate("b", 5, arrival=2), candidate("a", 5, arrival=1)]) == "a"


def run_queue(lengths_at, chunk, ageing, seconds_a_chunk):
    """Finish times of (arrival_s, tokens) jobs under the order, one chunk at a time."""
    remaining = dict(enumerate(tokens for _, tokens in lengths_at))
    done, now = {}, 0.0
    while remaining:
        ready = [
            candidate(str(i), left, waited=now - lengths_at[i][0], arrival=i)
            for i, left in remaining.items()
            if lengths_at[i][0] <= now
        ]
        now += seconds_a_chunk
        if not ready:
            continue
        chosen = int(first(ready, ageing))
        remaining[chosen] -= chunk
        if remaining[chosen] <= 0:
            done[chosen] = now
            del remaining[chosen]
    return done


def test_a_stream_of_short_jobs_starves_no_long_one_and_waits_for_none():
    jobs = [(0.0, 4000)] + [(0.05 + 0.2 * i, 100) for i in range(400)]
    done = run_queue(jobs, chunk=100, ageing=400.0, seconds_a_chunk=0.1)
    assert done[0] < 4000 / 400 + 4000 / 100 * 0.1 * 2 + 1
    assert max(done[i] - jobs[i][0] for i in range(1, 20)) <= 0.4


@given(
    st.integers(1, 400),
    st.integers(1, 12).map(lambda n: 8 * n),
    st.sets(st.integers(1, 50).map(lambda n: 8 * n)),
    st.integers(0, 399),
)
def test_chunk_ends_are_the_same_cold_and_warm(n_prompt, chunk_tokens, checkpoints, start):
    ahead = sorted(at for at in checkpoints if at <= n_prompt)

    def ends(at):
        while at < n_prompt:
            at = chunk_end(at, n_prompt, chunk_tokens, ahead)
            yield at

    cold = list(ends(0))
    assert cold == sorted({*range(chunk_tokens, n_prompt, chunk_tokens), *ahead, n_prompt})
    if start < n_prompt:
        assert list(ends(start)) == [end for end in cold if end > start]


def test_the_victim_is_the_newest_of_the_lowest_priority():
    running = [
        RunningSequence(job_id=name, priority=priority, arrival=arrival)
        for name, priority, arrival in [("a", 0, 9), ("b", 2, 3), ("c", 2, 5), ("d", 1, 8)]
    ]
    assert victim(running).job_id == "c"


def queued(name, slow, ahead=None, *, coming=False):
    return Queued(job_id=name, slow_bytes=slow, ahead_bytes=ahead, coming=coming)


def next_of(*queue, bytes_max=100, prompts_max=2):
    return next_ahead(queue, bytes_max=bytes_max, prompts_max=prompts_max)


def test_the_next_turn_that_lies_low_is_read_ahead():
    assert next_of(queued("fast", 0), queued("a", 30), queued("b", 30)) == ("a", 30)
    assert next_of(queued("a", 30, 30, coming=True), queued("b", 30)) == ("b", 30)
    assert next_of() is None


def test_nobody_is_read_ahead_past_one_that_waits_for_room():
    assert next_of(queued("a", 80, 80), queued("b", 30), queued("c", 10)) is None
    assert next_of(queued("a", 80, 80), queued("b", 20), queued("c", 10)) == ("b", 20)


def test_more_than_all_there_is_comes_in_part():
    assert next_of(queued("a", 500)) == ("a", 100)
    assert next_of(queued("a", 500, 1), queued("b", 500)) is None
    assert next_of(queued("a", 500), bytes_max=0) is None


def test_few_are_read_at_a_time():
    coming = [queued(name, 9, 9, coming=True) for name in "ab"]
    assert next_of(*coming, queued("c", 9)) is None
    assert next_of(coming[0], queued("b", 9, 9), queued("c", 9)) == ("c", 9)

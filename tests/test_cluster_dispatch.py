"""Where jobs go, and what follows when a try ends badly."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_workers import stats_of

from forebay.cluster.beat import Beat, Kind
from forebay.cluster.dispatch import (
    TRIES,
    Again,
    Ending,
    Lost,
    NoWorker,
    choose_decode,
    choose_prefill,
    http_status,
    what_next,
)
from forebay.cluster.placement import Placement
from forebay.cluster.registry import GONE_S, MISROUTED_S, SILENT_S, Entry, Registry
from forebay.cluster.step_loop import Pulse
from forebay.router.wire import Failed
from forebay.workers.job import Failure


def beat_of(worker: str, kind: Kind = "decode", *, busy: bool = False, stalled_s: float = 0.0, **stats: int) -> Beat:
    pulse = Pulse(stats=stats_of(**stats), busy=busy, turns=0, turned_at=0.0)
    return Beat(worker=worker, kind=kind, pid=1, node="n", pulse=pulse, stalled_s=stalled_s)


def failure(kind: Any) -> Failure:
    return Failure(job_id="j", kind=kind, message="why")


LOST = Lost(worker="w", reason="died")


@pytest.mark.parametrize(
    ("ending", "tries", "begun", "wanted"),
    [
        ("stop", 0, True, "stop"),
        ("length", 2, True, "length"),
        (LOST, 0, False, Again(reason="died", counts=True)),
        (LOST, TRIES - 2, True, Again(reason="died", counts=True)),
        (LOST, TRIES - 1, True, "internal"),
        (Lost(worker="w", reason="misrouted"), TRIES - 1, False, Again(reason="misrouted", counts=False, wait_s=0.05)),
        (NoWorker(kind="decode"), 0, False, "no_workers"),
        (failure("preempted"), TRIES - 1, True, Again(reason="preempted", counts=False, wait_s=0.05)),
        (failure("overloaded"), 0, False, "overloaded"),
        (failure("overloaded"), 0, True, Again(reason="overloaded", counts=False, wait_s=0.25)),
        (failure("invalid"), 0, False, "invalid"),
        (failure("deadline"), 0, True, "deadline"),
        (failure("handoff"), 0, False, Again(reason="handoff", counts=True)),
        (failure("internal"), TRIES - 1, False, "internal"),
        (failure("cancelled"), 0, False, Again(reason="cancelled", counts=True)),
    ],
    ids=str,
)
def test_what_follows(ending: Ending, tries: int, begun: bool, wanted: Again | str) -> None:
    step = what_next(ending, tries, begun)
    assert (step.kind if isinstance(step, Failed) else step) == wanted


def test_refusals_have_the_statuses_that_the_router_knows() -> None:
    assert (http_status("overloaded"), http_status("no_workers"), http_status("invalid")) == (429, 503, 400)


names = st.lists(st.text("abcdef0123", min_size=1, max_size=8), min_size=1, max_size=8, unique=True)


@given(names, st.text(max_size=12))
def test_a_session_stays_where_it_was_placed(workers: list[str], session: str) -> None:
    pool = {name: Entry(beat_of(name, "prefill"), 0.0) for name in workers}
    for placed in workers:
        assert choose_prefill(pool, session, placed) == placed
    assert choose_prefill(pool, session, "not there") in workers
    assert choose_prefill({}, session, workers[0]) is None


@given(names, st.text(min_size=1, max_size=12), st.data())
def test_only_sessions_of_a_dead_worker_move(workers: list[str], session: str, data: st.DataObject) -> None:
    """With equal load the choice is one of the session's first two: it changes only when one of these goes."""
    pool = {name: Entry(beat_of(name, "prefill"), 0.0) for name in workers}
    chosen = choose_prefill(pool, session, None)
    other = data.draw(st.sampled_from(workers))
    left = {name: entry for name, entry in pool.items() if name != other}
    moved = choose_prefill(left, session, chosen)
    assert moved == chosen or other == chosen


def test_sessions_spread_over_the_pool() -> None:
    pool = {f"w{n}": Entry(beat_of(f"w{n}", "prefill"), 0.0) for n in range(4)}
    chosen = [choose_prefill(pool, f"session {n}", None) for n in range(2000)]
    assert all(400 < chosen.count(name) < 600 for name in pool)


def test_a_new_session_avoids_the_laden_one_of_its_two() -> None:
    pool = {name: Entry(beat_of(name, "prefill"), 0.0) for name in ("a", "b")}
    pool["a"].beat = beat_of("a", "prefill", queued_tokens=10_000)
    assert {choose_prefill(pool, f"s{n}", None) for n in range(50)} == {"b"}
    assert choose_prefill(pool, "", None) == "b"


def test_a_decode_slot_is_taken_where_most_are_free() -> None:
    pool = {name: Entry(beat_of(name, slots=4), 0.0) for name in ("a", "b")}
    pool["a"].jobs = {"1", "2"}
    assert choose_decode(pool) == "b"
    pool["b"].full = True
    assert choose_decode(pool) == "a"
    pool["a"].jobs = {"1", "2", "3", "4"}
    assert choose_decode(pool) is None
    assert choose_decode({}) is None


def test_a_suspect_takes_no_job_until_it_beats_again() -> None:
    registry = Registry()
    registry.beat(beat_of("a"), 0.0)
    registry.suspect("a")
    assert registry.alive("decode", 0.1)
    assert not registry.live("decode", 0.1)
    registry.beat(beat_of("a"), 0.2)
    assert list(registry.live("decode", 0.2)) == ["a"]


def test_a_misrouted_worker_rests_though_it_beats() -> None:
    registry = Registry()
    registry.beat(beat_of("a"), 0.0)
    registry.misrouted("a", 0.0)
    registry.beat(beat_of("a"), 0.2)
    assert not registry.live("decode", 0.9 * MISROUTED_S)
    assert registry.live("decode", 1.1 * MISROUTED_S)


def test_the_silent_and_the_hanging_are_buried() -> None:
    registry = Registry()
    registry.beat(beat_of("silent"), 0.0)
    registry.beat(beat_of("hangs", busy=True, stalled_s=GONE_S - 0.1), 0.0)
    registry.beat(beat_of("idle"), 0.0)
    registry.beat(beat_of("fine", busy=True), 0.0)
    assert not registry.alive("decode", SILENT_S)
    for now in (0.2, GONE_S - 0.1):
        for name in ("idle", "fine"):
            registry.beat(beat_of(name), now)
        gone = dict(registry.bury(now))
        assert gone == ({"hangs": "hangs"} if now < 1 else {})
    assert dict(registry.bury(GONE_S)) == {"silent": "silent"}
    assert set(registry.all) == {"idle", "fine"}


def test_a_worker_that_hangs_is_not_taken_back_by_its_beats() -> None:
    registry = Registry()
    registry.beat(beat_of("a", busy=True, stalled_s=GONE_S), 0.0)
    assert registry.all == {}


def test_a_worker_in_the_place_of_a_dead_one_is_a_restart() -> None:
    registry = Registry()
    registry.beat(beat_of("a"), 0.0)
    assert registry.restarts["decode"] == 0
    registry.remove("a")
    registry.beat(beat_of("b"), 1.0)
    registry.beat(beat_of("c"), 1.0)
    assert registry.restarts == {"prefill": 0, "decode": 1}


def test_placements_are_bounded_and_forget_the_oldest() -> None:
    rng, placement = random.Random(2), Placement(10)
    order: list[str] = []
    for _ in range(500):
        session = f"s{rng.randrange(30)}"
        placement.put(session, f"w{rng.randrange(3)}")
        order = [name for name in order if name != session] + [session]
        order = order[-10:]
        assert len(placement) == len(order)
        assert all((placement.get(f"s{n}") is not None) == (f"s{n}" in order) for n in range(30))
    placement.put("", "w0")
    assert placement.get("") is None


def test_a_worker_whose_canary_failed_takes_no_job_any_more() -> None:
    registry = Registry()
    registry.beat(beat_of("sound"), 0.0)
    registry.beat(beat_of("wrong", canary_failed=1), 0.0)
    assert set(registry.live("decode", 0.0)) == {"sound"}
    assert registry.state("wrong", 0.0) == "barred"
    registry.beat(beat_of("wrong", canary_failed=1), 1.0)
    assert set(registry.live("decode", 1.0)) == {"sound"}

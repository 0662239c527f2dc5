"""What is learned of reuse, against a twin that keeps every stay and adds up in loops."""

from collections.abc import Callable
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from forebay.kvstore import reuse
from forebay.kvstore.reuse import BUCKETS, EDGES, GAP_LEVELS, KINDS, Gaps, Reuse, bucket_of, kind_of


def test_where_nothing_was_seen_density_falls_with_age_alike_for_all_kinds() -> None:
    learned = Reuse(3)
    ages = [2.0**k for k in range(12)]
    for kind in range(3):
        falling = [learned.density(kind, age) for age in ages]
        assert all(before > after for before, after in pairwise(falling))
        assert falling == [learned.density(0, age) for age in ages]


def test_stays_that_end_at_one_age_are_dense_until_then_and_worthless_after() -> None:
    learned = Reuse(2)
    for start in range(2000):
        learned.advance(start * 100)
        learned.end(learned.begin(0, start * 100, 10), start * 100 + 30, 10)
        learned.begin(1, start * 100, 10)
    assert learned.density(0, 25) > 3 * learned.density(0, 0) > 3 * learned.density(1, 0)
    assert learned.density(0, 60) < learned.density(0, 25) / 10


def test_what_is_forgotten_counts_neither_as_used_nor_as_unused() -> None:
    learned, other = Reuse(1), Reuse(1)
    for start in range(200):
        for each in (learned, other):
            each.advance(start * 1000)
            each.end(each.begin(0, start * 1000, 10), start * 1000 + 30, 10)
        learned.forget(learned.begin(0, start * 1000, 0))
    learned.advance(1e9)
    other.advance(1e9)
    assert learned._returned.tolist() == other._returned.tolist()
    assert learned._outlived.tolist() == other._outlived.tolist()


STAYS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 50), st.integers(1, 9), st.none() | st.integers(0, 3000)), max_size=40
)


def test_density_equals_a_twin_of_loops(examples: Callable[[int], int]) -> None:
    @settings(max_examples=examples(300))
    @given(STAYS)
    def check(stays: list[tuple[int, int, int, int | None]]) -> None:
        learned, now, events = Reuse(3), 0.0, []
        for kind, wait, blocks, length in stays:
            now += wait
            events += [(now, 1, kind, blocks, length)]
        ends: list[tuple[float, reuse.Stay, int]] = []
        for start, _, kind, blocks, length in events:
            for at, stay, n in sorted((end for end in ends if end[0] <= start), key=lambda end: end[0]):
                learned.advance(at)
                learned.end(stay, at, n)
            ends = [end for end in ends if end[0] > start]
            learned.advance(start)
            stay = learned.begin(kind, start, blocks)
            if length is not None:
                ends.append((start + length, stay, blocks))
        for at, stay, n in sorted(ends, key=lambda end: end[0]):
            learned.advance(at)
            learned.end(stay, at, n)
        finish = max([now, *(end[0] for end in ends)])
        np.testing.assert_allclose(learned._densities(), _twin(events, finish), rtol=1e-9)

    check()


def _twin(events: list[tuple[float, int, int, int, int | None]], finish: float) -> list[list[float]]:
    returned = [[0.0] * BUCKETS for _ in range(3)]
    outlived = [[0.0] * BUCKETS for _ in range(3)]
    for start, _, kind, blocks, length in events:
        age = length if length is not None else finish - start
        for bucket in range(BUCKETS - 1):
            if EDGES[bucket + 1] <= age:
                outlived[kind][bucket] += blocks
        if length is not None:
            returned[kind][bucket_of(length)] += blocks
    unit = max(1.0, sum(event[3] for event in events) / max(1, len(events)))
    share = _shares(returned, outlived, unit)
    widths = [*np.diff(EDGES).tolist(), float(EDGES[-1])]
    found = []
    for kind in range(3):
        row = []
        for start in range(BUCKETS):
            alive, used, held, best = 1.0, 0.0, 0.0, 0.0
            for bucket in range(start, BUCKETS):
                p = share[kind][bucket]
                held += alive * (1 - p / 2) * widths[bucket]
                used += alive * p
                alive *= 1 - p
                best = max(best, used / held)
            row.append(best)
        found.append(row)
    return found


def _shares(returned: list[list[float]], outlived: list[list[float]], unit: float) -> list[list[float]]:
    share = [[0.0] * BUCKETS for _ in range(3)]
    before, ratio = reuse.FIRST_SHARE, [1.0] * 3
    for b in range(BUCKETS):
        ended = sum(row[b] for row in returned)
        seen = ended + sum(row[b] for row in outlived)
        before = (ended + reuse.LIKE_BEFORE * unit * before) / (seen + reuse.LIKE_BEFORE * unit)
        for kind in range(3):
            belief = min(before * ratio[kind], 0.95) * reuse.LIKE_ALL * unit
            of_kind = returned[kind][b] + outlived[kind][b] + reuse.LIKE_ALL * unit
            share[kind][b] = (returned[kind][b] + belief) / of_kind
            ratio[kind] = share[kind][b] / before
    return share


@given(st.sampled_from(["tool_use", "end_turn", "", "length"]), st.floats(0, 20), st.integers(1, 100))
def test_kinds_are_few(stop: str, gap: float, uses: int) -> None:
    assert 0 <= kind_of(stop, gap, uses) < KINDS


def test_a_session_that_pauses_long_after_answers_is_told_by_its_stop() -> None:
    gaps, now = Gaps(), 0.0
    for _ in range(20):
        fast = gaps.usual("a", "tool_use", now)
        now += 8
        slow = gaps.usual("a", "end_turn", now)
        now += 512
    assert fast == pytest.approx(3, abs=0.1)
    assert slow == pytest.approx(9, abs=0.1)
    assert kind_of("tool_use", fast, 1) != kind_of("tool_use", slow, 1)
    assert gaps.usual("b", "tool_use", now) == gaps.usual(None, "tool_use", now)


def test_sessions_are_forgotten_the_longest_unused_first() -> None:
    gaps = Gaps(sessions_max=2)
    for now, session in enumerate(["a", "b", "a", "c"]):
        gaps.usual(session, "", now * 1024.0)
    assert gaps.usual("a", "", 4096.0) != gaps.usual(None, "", 0)
    assert gaps.usual("b", "", 5000.0) == gaps.usual(None, "", 0)
    assert GAP_LEVELS > 1

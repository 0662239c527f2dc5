"""The ring against brute force, and its laws: few sessions move, they spread, backup is never primary."""

import hashlib
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.router import ring, route
from forebay.router.memory import Placement

KEYS = [f"session-{i}" for i in range(4000)]
names = st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=8, unique=True)
weighted = st.dictionaries(
    st.text(min_size=1, max_size=6), st.sampled_from([0.5, 1.0, 2.0, 7.0]), min_size=1, max_size=8
)


def slow_rank(key, weights):
    """Picks the best of what is left, again and again, from the definition."""
    left, out = dict(weights), []
    while left:
        scores = {}
        for name, weight in left.items():
            raw = hashlib.blake2b(f"{len(name)}:{name}{key}".encode(), digest_size=8).digest()
            scores[name] = -weight / math.log(((int.from_bytes(raw, "big") >> 12) + 0.5) / 2**52)
        best = max(scores.values())
        first = min(name for name, score in scores.items() if score == best)
        out.append(first)
        del left[first]
    return tuple(out)


@given(st.text(max_size=20), weighted)
def test_rank_is_that_of_brute_force(key, weights):
    assert ring.rank(key, weights) == slow_rank(key, weights)


@given(st.text(max_size=20), names, st.data())
def test_backup_is_not_primary_and_both_are_alive(key, clusters, data):
    alive = data.draw(st.sets(st.sampled_from(clusters)))
    order = ring.alive_order(key, dict.fromkeys(clusters, 1.0), alive)
    assert set(order) == alive
    assert len(set(order)) == len(order)


@given(st.text(max_size=20), weighted, st.text(min_size=7, max_size=8))
def test_a_new_cluster_takes_sessions_and_moves_no_other(key, weights, new):
    before, after = ring.rank(key, weights), ring.rank(key, weights | {new: 1.0})
    assert tuple(name for name in after if name != new) == before


@pytest.mark.parametrize("n", [2, 4, 8])
def test_adding_one_of_n_moves_one_nth(n):
    weights = {f"c{i}": 1.0 for i in range(n)}
    old = {name: weight for name, weight in weights.items() if name != "c0"}
    moved = sum(ring.rank(key, old)[0] != ring.rank(key, weights)[0] for key in KEYS) / len(KEYS)
    assert abs(moved - 1 / n) < 4 * math.sqrt(1 / n / len(KEYS))


def test_sessions_of_a_dead_cluster_spread_evenly():
    weights = {f"c{i}": 1.0 for i in range(5)}
    orphans = [key for key in KEYS if ring.rank(key, weights)[0] == "c2"]
    spread = Counter(ring.alive_order(key, weights, set(weights) - {"c2"})[0] for key in orphans)
    assert set(spread) == set(weights) - {"c2"}
    assert max(spread.values()) < 1.35 * len(orphans) / 4
    assert all(
        ring.alive_order(key, weights, set(weights) - {"c2"})[0] == ring.rank(key, weights)[1] for key in orphans
    )


def test_weights_express_capacity():
    counts = Counter(ring.rank(key, {"big": 3.0, "small": 1.0})[0] for key in KEYS)
    assert abs(counts["big"] / len(KEYS) - 0.75) < 0.03


def test_score_is_finite_and_positive_at_the_ends_of_the_hash(monkeypatch):
    for raw in (b"\x00" * 8, b"\xff" * 8):
        monkeypatch.setattr(ring, "blake2b", lambda *_, raw=raw, **__: type("H", (), {"digest": lambda self: raw})())
        assert 0 < ring.score("k", "c", 1.0) < math.inf


WEIGHTS = {"a": 1.0, "b": 1.0, "c": 1.0}


def order(key, alive, placement=None, cached=False, now=100.0):
    return route.order(key, WEIGHTS, alive, placement, cached, now, idle_s=60.0)


def test_a_busy_session_stays_on_the_backup_that_served_it():
    primary, backup, third = ring.rank("s", WEIGHTS)
    served = Placement(cluster=backup, at=90.0)
    assert order("s", WEIGHTS, served) == (backup, primary, third)
    assert order("s", WEIGHTS, served, cached=True)[0] == primary
    assert order("s", WEIGHTS, served, now=151.0)[0] == primary
    assert order("s", {primary, third}, served) == (primary, third)


def test_no_cluster_alive_is_an_empty_order():
    assert order("s", set()) == ()

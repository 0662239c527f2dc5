"""Up and down of clusters: down fast, up slowly, and what was cached is forgotten only after a loss."""

from hypothesis import given
from hypothesis import strategies as st

from forebay.router.liveness import Liveness


def machine():
    return Liveness(["a", "b"], fall=2, rise=3, hung_s=5.0)


def test_first_good_probe_is_enough_and_later_ones_need_a_row():
    live = machine()
    assert live.alive() == frozenset()
    live.observe("a", "ready", 0.0)
    assert live.alive() == {"a"}
    live.observe("a", "not_ready", 1.0)
    assert not live.is_up("a")
    for at in (2.0, 3.0):
        live.observe("a", "ready", at)
        assert not live.is_up("a")
    live.observe("a", "ready", 4.0)
    assert live.is_up("a")
    assert live.generation("a") == 0, "it answered all the time: its cache is trusted"


def test_silence_needs_two_probes_and_refusal_none():
    live = machine()
    live.observe("a", "ready", 0.0)
    live.observe("a", "unreachable", 1.0)
    assert live.is_up("a")
    live.observe("a", "unreachable", 2.0)
    assert not live.is_up("a")
    live.observe("b", "ready", 0.0)
    live.lose("b")
    assert not live.is_up("b")
    for at in (3.0, 4.0, 5.0):
        live.observe("b", "ready", at)
    assert live.is_up("b")
    assert live.generation("b") == 1


def test_hung_is_silence_for_long_after_an_answer():
    live = machine()
    live.observe("a", "ready", 0.0)
    live.observe("a", "unreachable", 1.0)
    live.observe("a", "unreachable", 2.0)
    assert live.hung(4.9) == []
    assert live.hung(5.0) == ["a"]
    live.observe("a", "not_ready", 6.0)
    assert live.hung(10.0) == []


@given(st.lists(st.sampled_from(["ready", "not_ready", "unreachable", "lose"]), max_size=60))
def test_against_the_history(events):
    live = machine()
    for at, event in enumerate(events):
        if event == "lose":
            live.lose("a")
        else:
            live.observe("a", event, float(at))
    assert live.is_up("a") == slow_is_up(events)


def slow_is_up(events):
    """Looks back from the end: up, unless the last thing that takes a cluster down was not made good since."""
    downs = [
        i
        for i, event in enumerate(events)
        if event in ("not_ready", "lose") or (event == "unreachable" and events[i - 1 : i] == ["unreachable"])
    ]
    start = downs[-1] + 1 if downs else 0
    since = events[start:]
    if "ready" not in events[:start]:
        return "ready" in since
    return "ready ready ready" in " ".join(since)

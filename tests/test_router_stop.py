"""Stop strings against the brute force on the whole text, at every split."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forebay.router.stop import StopStrings


def brute_force(text: str, stops: list[str]) -> tuple[str, bool]:
    for end in range(1, len(text) + 1):
        met = [len(stop) for stop in stops if stop and text[:end].endswith(stop)]
        if met:
            return text[: end - max(met)], True
    return text, False


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    """What is shown in all; checks after every piece that no more is held back than could still be a stop string."""
    machine = StopStrings(stops)
    shown, fed = "", ""
    for piece in pieces:
        emitted, stopped = machine.feed(piece)
        shown, fed = shown + emitted, fed + piece
        if stopped:
            return shown, True
        held = fed[len(shown) :]
        assert fed.startswith(shown)
        assert not held or any(stop.startswith(held) for stop in stops)
    return shown + machine.finish(), False


@given(st.text("ab", max_size=12), st.lists(st.text("ab", max_size=4), max_size=3))
@example("aabaaabaaaa", ["aabaaaa"])  # a border of a border
@example("abacabacabad", ["abacabad"])
def test_equals_the_brute_force_at_every_split(text: str, stops: list[str]) -> None:
    expected = brute_force(text, stops)
    assert run([text], stops) == expected
    assert run(list(text), stops) == expected
    for i in range(len(text) + 1):
        assert run([text[:i], text[i:]], stops) == expected


@given(st.lists(st.text("abc\n🙂"), max_size=8), st.lists(st.text("abc\n🙂", min_size=1, max_size=5), max_size=4))
def test_equals_the_brute_force_for_any_pieces(pieces: list[str], stops: list[str]) -> None:
    assert run(pieces, stops) == brute_force("".join(pieces), stops)


def test_holds_back_only_what_may_become_a_stop_string() -> None:
    machine = StopStrings(["\n\nUser:"])
    assert machine.feed("a\n") == ("a", False)
    assert machine.feed("b\n\nUs") == ("\nb", False)
    assert machine.feed("ually") == ("\n\nUsually", False)
    assert machine.feed("\n\nUser: hi") == ("", True)
    assert machine.feed("more") == ("", True)
    assert machine.finish() == ""


def test_without_stop_strings_everything_passes() -> None:
    assert StopStrings([]).feed("abc") == ("abc", False)


@pytest.mark.parametrize("length", [5000])
def test_a_long_periodic_stop_string_costs_no_square(length: int) -> None:
    """The automaton looks at each character once; the square would be tens of millions of steps here."""
    machine = StopStrings(["a" * length + "b"])
    assert machine.feed("a" * (4 * length)) == ("a" * (3 * length), False)
    assert machine.feed("b") == ("", True)

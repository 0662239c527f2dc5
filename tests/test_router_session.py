"""The session key in its documented order, and the memory of what sessions have cached."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.router.memory import SessionMemory, uncached_tokens
from forebay.router.session import HEADERS, chat_opening, digest, identify, ids_opening


def test_order_of_sources():
    given_names = [*HEADERS, "cache", "user", "meta"]
    for first in range(len(given_names)):
        headers = {name: name for name in HEADERS[first:]}
        rest = [name if given_names.index(name) >= first else None for name in ("cache", "user", "meta")]
        session = identify(headers, *rest, b"opening")
        assert session.key == digest(given_names[first])
    assert identify({}, None, None, None, b"opening").source == "content"
    assert identify({}, "", None, None, b"opening").source == "content"
    assert identify({"x-session-id": "s"}, "c", "u", None, b"").source == "header"
    assert identify({}, "c", "u", None, b"").source == "prompt_cache_key"
    assert identify({}, None, None, "m", b"").source == "user"


def test_the_name_itself_is_not_the_key():
    assert "alice" not in identify({"x-session-id": "alice"}, None, None, None, b"").key


def turns(system, first, *more):
    return [{"role": "system", "content": system}, {"role": "user", "content": first}, *more]


def test_content_key_stays_over_turns_and_tells_conversations_apart():
    later = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    one = chat_opening(turns("sys", "hello"))
    assert chat_opening(turns("sys", "hello", *later)) == one
    assert chat_opening(turns("sys", "other")) != one
    assert chat_opening(turns("other", "hello")) != one
    assert chat_opening([{"content": "sys", "role": "system"}, {"content": "hello", "role": "user"}]) == one


def test_no_user_message_takes_all():
    assert chat_opening([{"role": "system", "content": "x"}]) != chat_opening([{"role": "system", "content": "y"}])


def test_bare_prompts_are_told_apart_by_their_first_two_blocks():
    shared = list(range(8))
    assert ids_opening([*shared, 1, 2], 8) != ids_opening([*shared, 1, 3], 8)
    assert ids_opening(list(range(40)), 8) == ids_opening(list(range(16)), 8)


@pytest.mark.parametrize(
    ("cached", "prompt", "left"), [(0, 10, 10), (64, 64, 32), (64, 65, 1), (63, 100, 68), (96, 40, 8)]
)
def test_uncached_tokens(cached, prompt, left):
    assert uncached_tokens(prompt, cached, 32) == left


@given(st.integers(1, 5000), st.integers(0, 5000), st.sampled_from([1, 8, 32, 512]))
def test_uncached_is_at_least_one_and_hits_are_whole_blocks(prompt, cached, block):
    left = uncached_tokens(prompt, cached, block)
    slow = max(hit for hit in range(0, prompt, block) if hit <= cached)
    assert left == prompt - slow
    assert left >= 1


def test_memory_forgets_by_use_and_by_generation():
    memory = SessionMemory(2)
    memory.remember("s", "a", 0, 100, now=1.0)
    memory.remember("t", "a", 0, 50, now=2.0)
    assert memory.cached_tokens("s", "a", 0) == 100
    assert memory.cached_tokens("s", "b", 0) == 0
    assert memory.cached_tokens("s", "a", 1) == 0
    memory.remember("s", "b", 3, 120, now=3.0)
    assert memory.placement("s").cluster == "b"
    assert memory.cached_tokens("s", "a", 0) == 100
    memory.remember("u", "a", 0, 1, now=4.0)
    assert len(memory) == 2
    assert memory.placement("t") is None

"""Sessions: read from the file where it names them, else derived; the index equals a search over all earlier ones."""

from hypothesis import given
from hypothesis import strategies as st

from forebay.ops.trace import BLOCK_TOKENS, Request
from forebay.ops.turns import PARENT_BLOCKS_MIN, turns


def request(at_ms: float, hash_ids: tuple[int, ...], tail: int = BLOCK_TOKENS, session: str | None = None) -> Request:
    tokens = (len(hash_ids) - 1) * BLOCK_TOKENS + tail
    return Request(timestamp_ms=at_ms, input_tokens=tokens, output_tokens=1, hash_ids=hash_ids, session=session)


def test_a_conversation_is_one_session_though_its_partial_tail_changes() -> None:
    made = turns([request(0, (0, 1, 2), tail=9), request(1, (0, 1, 3, 4)), request(2, (0, 1, 3, 4, 5), tail=1)])
    assert [turn.parent for turn in made] == [None, 0, 1]
    assert [turn.number for turn in made] == [0, 1, 2]
    assert {turn.session for turn in made} == {"replay-0"}


def test_a_shared_system_prompt_makes_no_session() -> None:
    made = turns([request(0, (0,)), request(1, (0, 1, 2)), request(2, (0, 3, 4))])
    assert [turn.parent for turn in made] == [None, None, None]
    assert len({turn.session for turn in made}) == 3


def test_a_branch_waits_for_its_parent_in_a_session_of_its_own() -> None:
    made = turns([request(0, (0, 1)), request(1, (0, 1, 2)), request(2, (0, 1, 3)), request(3, (0, 1, 3, 4))])
    assert [turn.parent for turn in made] == [None, 0, 0, 2]
    assert [turn.session for turn in made] == ["replay-0", "replay-0", "replay-2", "replay-2"]
    assert [turn.number for turn in made] == [0, 1, 0, 1]


def test_sessions_of_the_file_are_kept_whatever_the_blocks_say() -> None:
    made = turns([request(0, (0, 1), session="a"), request(1, (0, 1, 2), session="b"), request(2, (9,), session="a")])
    assert [turn.parent for turn in made] == [None, None, 0]
    assert [turn.session for turn in made] == ["replay-a", "replay-b", "replay-a"]


def _slow_parent(requests: list[Request], index: int) -> int | None:
    """Compares with every earlier request."""
    best, best_blocks = None, PARENT_BLOCKS_MIN - 1
    for i, earlier in enumerate(requests[:index]):
        full = earlier.hash_ids[: earlier.input_tokens // BLOCK_TOKENS]
        if len(full) >= max(best_blocks, PARENT_BLOCKS_MIN) and requests[index].hash_ids[: len(full)] == full:
            best, best_blocks = i, len(full)
    return best


@st.composite
def traces(draw: st.DrawFn) -> list[Request]:
    """Chained ids: every id has one parent, as renumbered chained hashes have."""
    chains: list[tuple[int, ...]] = [()]
    requests = []
    for at_ms in range(draw(st.integers(1, 25))):
        chain = draw(st.sampled_from(chains))
        for _ in range(draw(st.integers(0 if chain else 1, 3))):
            chain = (*chain, sum(map(len, chains)) * 1000 + len(chain))
            chains.append(chain)
        requests.append(request(at_ms, chain, tail=draw(st.sampled_from([1, 511, 512]))))
    return requests


@given(traces())
def test_parents_equal_a_search_over_all_earlier_requests(requests: list[Request]) -> None:
    made = turns(requests)
    assert [turn.parent for turn in made] == [_slow_parent(requests, i) for i in range(len(requests))]
    heirs = [(turn.session, turn.number) for turn in made]
    assert len(set(heirs)) == len(heirs), "a session is a chain: one turn of each number"
    for turn in made:
        if turn.number:
            assert turn.parent is not None
            assert made[turn.parent].session == turn.session

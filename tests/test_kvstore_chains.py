"""Chains of sessions, against the chain of each prompt by itself; and what of them is hashed."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from forebay.kvstore import chain as chain_file
from forebay.kvstore.chain import block_chain
from forebay.kvstore.chains import Chains

PROMPTS = st.lists(
    st.tuples(
        st.sampled_from(["", "a", "b", "c"]),
        st.sampled_from(["", "tenant"]),
        st.integers(0, 40),
        st.lists(st.integers(0, 1), max_size=20),
    ),
    max_size=20,
)


@given(PROMPTS, st.integers(0, 60))
def test_keys_are_those_of_the_prompt_alone_and_memory_is_bounded(
    prompts: list[tuple[str, str, int, list[int]]], tokens_max: int
) -> None:
    chains, before = Chains(4, "model", tokens_max), [0] * 40
    for session, salt, kept, tail in prompts:
        ids = before[:kept] + tail
        assert chains.chain(ids, salt, session) == block_chain(ids, 4, "model", salt)
        assert chains.tokens == sum(len(last.ids) for last in chains._last.values()) <= tokens_max
        before = ids or before


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each call of the hash."""
    seen: list[int] = []
    real = chain_file.blake3

    def counting(data: bytes) -> object:
        seen.append(len(data))
        return real(data)

    monkeypatch.setattr(chain_file, "blake3", counting)
    return seen


def test_a_known_session_hashes_its_new_tail_alone(hashed: list[int]) -> None:
    chains, ids = Chains(512, "model"), np.arange(100 * 512 + 7, dtype=np.int32)
    chains.chain(ids[: 90 * 512 + 3], "", "a")
    hashed.clear()
    chains.chain(ids, "", "a")
    assert hashed == [32 + 4 * 512] * 10
    chains.chain(ids, "", "a")
    assert len(hashed) == 10, "nothing new"
    chains.chain(ids, "", "b")
    assert len(hashed) == 10 + 101, "another session, seed included"


def test_who_changes_the_ids_afterwards_changes_no_key(hashed: list[int]) -> None:
    chains, ids = Chains(4, "model"), np.arange(16, dtype=np.int32)
    chains.chain(ids, "", "a")
    ids[5] = 99
    assert chains.chain(ids, "", "a") == block_chain(ids, 4, "model", "")

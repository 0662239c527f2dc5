"""Where checkpoints are kept, and what is worth keeping."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from forebay.kvstore.config import StoreConfig
from forebay.kvstore.policy import PrefillCost, checkpoints_for, recency, worth


def at(policy: str, n_prompt: int, hit: int = 0, branches: tuple[int, ...] = ()) -> tuple[int, ...]:
    return checkpoints_for(policy, n_prompt=n_prompt, hit_tokens=hit, block_tokens=512, branches=branches)


def test_prompt_end_is_the_last_block_end() -> None:
    assert at("prompt_end", 2800) == (2560,)
    assert at("prompt_end", 2561) == (2560,)


def test_prompt_end_on_a_block_end_also_serves_the_same_prompt_again() -> None:
    assert at("prompt_end", 2560) == (2048, 2560)
    assert at("prompt_end", 512) == (512,)


def test_nothing_to_keep() -> None:
    assert at("prompt_end", 511) == ()
    assert at("prompt_end+interval:512", 2800, hit=2560) == ()


def test_unions() -> None:
    assert at("interval:1024", 4000) == (1024, 2048, 3072)
    assert at("interval:1000", 4000) == (1024, 2048, 3072), "rounded up to blocks"
    assert at("junction", 4000, hit=512, branches=(512, 1536)) == (1536,)
    assert at("prompt_end+junction+interval:2048", 4000, branches=(1536,)) == (1536, 2048, 3584)


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("", "unknown"),
        ("every", "known are"),
        ("interval", "number"),
        ("interval:0", "number"),
        ("prompt_end:3", "no number"),
    ],
)
def test_wrong_names_are_told(policy: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        at(policy, 1000)


@given(st.integers(1, 10_000), st.integers(0, 20), st.integers(1, 5000), st.lists(st.integers(0, 12_000)))
def test_positions_are_ascending_block_ends_after_the_hit(
    n_prompt: int, hit_blocks: int, every: int, branches: list[int]
) -> None:
    found = at(f"prompt_end+junction+interval:{every}", n_prompt, hit_blocks * 512, tuple(branches))
    assert list(found) == sorted(set(found))
    assert all(hit_blocks * 512 < end <= n_prompt and end % 512 == 0 for end in found)
    assert hit_blocks * 512 >= n_prompt // 512 * 512 or n_prompt // 512 * 512 in found


def test_cost_adds_up_over_a_split() -> None:
    cost = PrefillCost(token_s=1e-3, pair_s=1e-6)
    assert cost.seconds(0, 1000) == pytest.approx(cost.seconds(0, 400) + cost.seconds(400, 1000))
    assert cost.seconds(1000, 1400) > cost.seconds(0, 400)


def test_worth_rises_with_seconds_and_falls_with_bytes_and_age() -> None:
    assert worth(2.0, 100, 0.3) > worth(1.0, 100, 0.3)
    assert worth(1.0, 100, 0.3) > worth(1.0, 200, 0.3)
    assert worth(1.0, 100, recency(3)) > worth(1.0, 100, recency(4))
    many = worth(np.array([2.0, 1.0]), 100, np.array([0.3, 0.4]))
    assert many.tolist() == [worth(2.0, 100, 0.3), worth(1.0, 100, 0.4)]


@pytest.mark.parametrize(
    ("field", "value"),
    [("checkpoints", "every"), ("write", "later"), ("device_bytes", 0), ("host_bytes", -1), ("prefill_token_s", 0.0)],
)
def test_a_wrong_configuration_names_its_field(field: str, value: object) -> None:
    good = StoreConfig(device_bytes=1, run_dir="run")
    with pytest.raises(ValueError, match=field):
        replace(good, **{field: value})

"""Block keys name a block and all before it, under one model and tenant."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from forebay.kvstore.chain import block_chain

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(IDS, IDS)
def test_keys_are_equal_exactly_where_prefixes_are(a: list[int], b: list[int]) -> None:
    keys_a, keys_b = (block_chain(ids, 4, "model", "").keys for ids in (a, b))
    assert len(keys_a) == len(a) // 4
    for block, (key_a, key_b) in enumerate(zip(keys_a, keys_b, strict=False)):
        assert (key_a == key_b) == (a[: 4 * block + 4] == b[: 4 * block + 4])


def test_model_and_tenant_part_all_keys() -> None:
    ids = list(range(16))
    chains = [
        block_chain(ids, 4, *seed).keys for seed in [("ab", "c"), ("a", "bc"), ("ab", ""), ("", "ab"), ("abc", "")]
    ]
    assert len({key for keys in chains for key in keys}) == sum(len(keys) for keys in chains)


def test_arrays_and_lists_of_any_width_agree() -> None:
    ids = [1, 2, 3, 163_839] * 3
    expected = block_chain(ids, 4, "m", "s")
    assert all(block_chain(np.array(ids, dtype=dtype), 4, "m", "s") == expected for dtype in ("i4", "i8", ">i4"))

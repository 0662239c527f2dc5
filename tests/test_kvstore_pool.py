"""Pages and bytes of a tier add up, whatever happens."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from forebay.kvstore.extents import Extents
from forebay.kvstore.pool import PagePool


def test_a_page_has_one_place() -> None:
    pool = PagePool(5)
    pages = pool.take(3)
    pool.cache(2)
    pool.check()
    assert (pool.free, pool.leased, pool.cached) == (2, 1, 2)
    pool.lease(1)
    pool.give(pages[:2], cached=False)
    pool.give(pages[2:], cached=True)
    pool.check()
    assert (pool.free, pool.leased, pool.cached) == (5, 0, 0)
    with pytest.raises(AssertionError):
        pool.give(pages[:1], cached=False)
    with pytest.raises(AssertionError):
        pool.take(6)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 700)), max_size=60))
def test_extents_never_overlap_and_join_again(steps: list[tuple[bool, int]]) -> None:
    extents = Extents(2048)
    taken: dict[int, int] = {}
    for give, number in steps:
        if give and taken:
            offset = list(taken)[number % len(taken)]
            extents.give(offset)
            del taken[offset]
        else:
            largest = extents.largest_bytes
            offset = extents.take(number)
            assert (offset is None) == (max(number, 1) > largest)
            if offset is not None:
                assert all(offset + number <= other or other + size <= offset for other, size in taken.items())
                taken[offset] = max(number, 1)
        extents.check()
    for offset in taken:
        extents.give(offset)
    extents.check()
    assert extents.largest_bytes == extents.free_bytes == 2048

"""An object of the pool: named and laid out by what it holds alone, so that who knows a prompt can read it."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from forebay.kvstore.moves import Label, Origin
from forebay.kvstore.pool_object import PoolObject

ROWS, ROW_BYTES = 3, 256


def unit_of(group: str, n_keys: int, origin: Origin) -> PoolObject:
    keys = tuple(bytes([n]) * 32 for n in range(n_keys))
    label = Label(group=group, keys=keys, before=None, start_tokens=0, end_tokens=16 * n_keys, origin=origin)
    return PoolObject(label=label, mark=b"m" * 32, rows=ROWS, row_bytes=ROW_BYTES)


@given(
    group=st.sampled_from(["latent", "index", "states 0 of 1"]),
    n_keys=st.integers(1, 6),
    class_name=st.text(max_size=40),
    owned=st.booleans(),
)
def test_who_stored_it_changes_neither_its_length_nor_whether_others_can_read_it(
    group: str, n_keys: int, class_name: str, owned: bool
) -> None:
    mark = b"s" * 16 if owned else b""
    stored = unit_of(group, n_keys, Origin(class_name=class_name, session=mark, tenant=mark))
    sought = unit_of(group, n_keys, Origin())
    rows = np.random.default_rng(n_keys).integers(0, 256, (ROWS, ROW_BYTES), dtype=np.uint8)
    image = np.zeros(stored.total_bytes, dtype=np.uint8)
    stored.fill(image, rows)
    assert (stored.name, stored.total_bytes) == (sought.name, sought.total_bytes)
    assert sought.is_whole(image)
    assert np.array_equal(sought.data_of(image), rows)
    image[-1] ^= 1
    assert not sought.is_whole(image)

"""A copy that takes its checksum on the way, against a copy and a checksum."""

import numpy as np
import pytest

from forebay.kvstore.checksum import PIECE_BYTES, checksum, copy_checked


@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 96), (7, PIECE_BYTES // 2), (5, PIECE_BYTES), (2, PIECE_BYTES + 1), (1, 3 * PIECE_BYTES - 5)]
)
def test_copies_and_tells_the_checksum_of_the_whole(shape: tuple[int, int]) -> None:
    wide = np.random.default_rng(0).integers(0, 256, (shape[0], shape[1] + 8), dtype=np.uint8)
    for source in (wide[:, 3 : 3 + shape[1]], np.ascontiguousarray(wide[:, : shape[1]])):
        target = np.zeros(shape, np.uint8)
        assert copy_checked(target, source) == checksum(np.ascontiguousarray(source))
        assert (target == source).all()

"""The checksum of every byte that leaves device memory: xxh3, 64 bits."""

import numpy as np
import numpy.typing as npt
import xxhash


def checksum(data: npt.NDArray[np.uint8]) -> int:
    """Of a contiguous array's bytes."""
    return xxhash.xxh3_64_intdigest(data.data)

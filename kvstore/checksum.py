"""The checksum of every byte that leaves device memory: xxh3, 64 bits."""

import numpy as np
import numpy.typing as npt
import xxhash

PIECE_BYTES = 256 << 10
"""What lies in a core's cache still when it is read again."""


def checksum(data: npt.NDArray[np.uint8]) -> int:
    """Of a contiguous array's bytes."""
    return xxhash.xxh3_64_intdigest(data.data)


def copy_checked(target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> int:
    """Copy [rows, row bytes] into a C-contiguous `target`, and take the checksum of what arrived: piece by piece, while
    each is in the core's cache. It adds about a fifth to a copy at 14 GB/s; another thread would not make it less."""
    seen = xxhash.xxh3_64()
    n_rows, row_bytes = source.shape
    step = max(1, PIECE_BYTES // row_bytes)
    for row in range(0, n_rows, step):
        for start in range(0, row_bytes, PIECE_BYTES):
            piece = target[row : row + step, start : start + PIECE_BYTES]
            piece[:] = source[row : row + step, start : start + PIECE_BYTES]
            seen.update(piece.reshape(-1).data)
    return seen.intdigest()

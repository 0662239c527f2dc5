"""Bytes in shared memory: one file in a run folder, made and touched at start, removed at exit, swept when stale."""

import numpy as np
import numpy.typing as npt


class Arena:
    """`path`: the file. `bytes`: uint8 [n_bytes], writable, of this process."""

    path: str
    bytes: npt.NDArray[np.uint8]

    def __init__(self, run_dir: str, name: str, n_bytes: int) -> None:
        raise NotImplementedError

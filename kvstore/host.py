"""The host tier's bytes: pages in shared memory, each with the checksum it was stored under."""

import numpy as np
import numpy.typing as npt

from forebay.kvstore.arena import Arena
from forebay.kvstore.checksum import checksum
from forebay.kvstore.device import DevicePool
from forebay.kvstore.moves import Move


class HostPool:
    """`bytes` uint8 [n_pages, page_bytes], all of `arena`'s pages. `save` and `restore` carry out moves."""

    def __init__(self, arena: Arena, page_bytes: int) -> None:
        n_pages = len(arena.bytes) // page_bytes
        self.bytes = arena.bytes[: n_pages * page_bytes].reshape(n_pages, page_bytes)
        self._arena = arena
        self._lengths = np.zeros(n_pages, dtype=np.int64)
        self._checksums = np.zeros(n_pages, dtype=np.uint64)

    def save(self, device: DevicePool, move: Move) -> None:
        """Copy device pages down. The checksum is taken of what arrived."""
        self.bytes[move.target_pages, : move.n_bytes] = device.gather(move.source_pages, move.n_bytes)
        for page in move.target_pages.tolist():
            self._lengths[page] = move.n_bytes
            self._checksums[page] = checksum(self.bytes[page, : move.n_bytes])

    def restore(self, device: DevicePool, move: Move) -> list[int]:
        """Copy host pages up, all or none: returns those whose bytes are not what was saved, [] where all arrived."""
        wrong = [page for page in move.source_pages.tolist() if not self._is_intact(page, move.n_bytes)]
        if not wrong:
            device.scatter(move.target_pages, self.bytes[move.source_pages, : move.n_bytes])
        return wrong

    def read(self, move: Move) -> npt.NDArray[np.uint8] | None:
        """A copy of the pages that go further down, [n, n_bytes]; None where one is not what was saved."""
        data = self.bytes[move.source_pages, : move.n_bytes]
        pages = zip(move.source_pages.tolist(), data, strict=True)
        whole = all(self._lengths[page] == len(row) and checksum(row) == self._checksums[page] for page, row in pages)
        return data if whole else None

    def close(self) -> None:
        self._arena.close()

    def _is_intact(self, page: int, n_bytes: int) -> bool:
        """The whole run is checked even where only its first blocks are wanted."""
        length = int(self._lengths[page])
        return n_bytes <= length and checksum(self.bytes[page, :length]) == int(self._checksums[page])

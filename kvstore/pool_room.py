"""Registered memory, lent out piece by piece: whoever drops what it was lent has given it back."""

import threading
import time
import weakref

import numpy as np
import numpy.typing as npt

from forebay.kvstore.extents import Extents

Bytes = npt.NDArray[np.uint8]


class Lent:
    """`bytes` uint8 [n_bytes] is one's own as long as this object lives, or until `give_back`."""

    def __init__(self, room: "Room", offset: int, n_bytes: int) -> None:
        self.bytes = room.bytes[offset : offset + n_bytes]
        self.give_back = weakref.finalize(self, room.give, offset)

    @property
    def address(self) -> int:
        return int(self.bytes.ctypes.data)


class Room:
    """Part of `memory`, from any thread."""

    def __init__(self, memory: Bytes) -> None:
        self.bytes = memory
        self._extents = Extents(len(memory))
        # Reentrant: the end of something lent may come in the middle of a call.
        self._changed = threading.Condition(threading.RLock())

    def take(self, n_bytes: int, timeout_s: float = 0.0) -> Lent | None:
        """None where so much is not free together, nor becomes so in time."""
        until = time.monotonic() + timeout_s
        with self._changed:
            while (offset := self._extents.take(n_bytes)) is None:
                left_s = until - time.monotonic()
                if left_s <= 0 or n_bytes > len(self.bytes):
                    return None
                self._changed.wait(left_s)
        return Lent(self, offset, n_bytes)

    def give(self, offset: int) -> None:
        with self._changed:
            self._extents.give(offset)
            self._changed.notify_all()

    @property
    def taken_bytes(self) -> int:
        with self._changed:
            return len(self.bytes) - self._extents.free_bytes

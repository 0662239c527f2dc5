"""A pool that lives in this process and can fail in every way that a real one does."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest

from forebay.kvstore import memory as memory_module
from forebay.kvstore.pool_client import Trouble

Bytes = npt.NDArray[np.uint8]


@dataclass
class Objects:
    """What the pool holds, by name, and what ails it: `away` its master, `full` it all."""

    held: dict[str, bytes] = field(default_factory=dict)
    away: bool = False
    full: bool = False

    def restart(self) -> None:
        self.held.clear()

    def spoil(self, number: int, at: int) -> None:
        """One byte of one object becomes another."""
        if self.held:
            name = sorted(self.held)[number % len(self.held)]
            image = bytearray(self.held[name])
            image[at % len(image)] ^= 1
            self.held[name] = bytes(image)

    def drop(self, number: int) -> None:
        """A third of all."""
        for name in sorted(self.held)[number % 3 :: 3]:
            del self.held[name]


class FakeClient:
    """See `pool_client.Client`."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._memory: Bytes = np.empty(0, dtype=np.uint8)

    def register(self, buffer: Bytes) -> None:
        self._memory = buffer

    def put(self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[Trouble | None]:
        return [self._put(name, self._at(at, size)) for name, at, size in zip(names, addresses, sizes, strict=True)]

    def get(self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[Trouble | None]:
        return [self._get(name, self._at(at, size)) for name, at, size in zip(names, addresses, sizes, strict=True)]

    def exist(self, names: Sequence[str]) -> list[bool] | None:
        return None if self._objects.away else [name in self._objects.held for name in names]

    def remove(self, name: str) -> None:
        self._objects.held.pop(name, None)

    def close(self) -> None:
        pass

    def _at(self, address: int, size: int) -> Bytes:
        start = address - int(self._memory.ctypes.data)
        assert 0 <= start <= start + size <= len(self._memory), "registered memory only"
        return self._memory[start : start + size]

    def _put(self, name: str, image: Bytes) -> Trouble | None:
        if self._objects.away:
            return "unreachable"
        if name not in self._objects.held:
            if self._objects.full:
                return "full"
            self._objects.held[name] = image.tobytes()
        return None

    def _get(self, name: str, room: Bytes) -> Trouble | None:
        image = self._objects.held.get(name)
        if self._objects.away or image is None:
            return "unreachable" if self._objects.away else "gone"
        if len(image) != len(room):
            return "size"
        room[:] = np.frombuffer(image, np.uint8)
        return None


@contextmanager
def pool_of(objects: Objects) -> Iterator[None]:
    """Stores that are made meanwhile join this pool."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_module, "MooncakeClient", lambda address, config: FakeClient(objects))
        patch.setattr(memory_module, "load", lambda name: None)
        yield

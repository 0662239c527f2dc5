"""One file of shared memory for many processes: made by the first, found by the others, removed by the last.

    NAME.shared     in the run folder; allocated in full when it is made, so that a full folder is an error then

The lock on it is the kernel's: a process that dies in the critical section holds it no longer.
"""

import contextlib
import fcntl
import mmap
import os
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from forebay.kvstore.arena import ArenaError, start_time
from forebay.kvstore.shared_table import (
    ALIGN_BYTES,
    HEADER,
    MAGIC,
    VERSION,
    WORKER,
    WORKERS,
    Alive,
    Geometry,
    Table,
    table_bytes,
)

SUFFIX = ".shared"
HEAD_BYTES = 2 * ALIGN_BYTES
"""The header and the workers, which lie at one place in every table of this format."""

LOCK_S = 0.2
"""How long a worker waits for the lock; critical sections take far less."""

RETRY_S = 2.0
"""How long a worker does without the tier after it waited in vain."""


def alive(pid: int, started: int) -> bool:
    return start_time(pid) == started


class SharedFile:
    """The file, opened and mapped, or made; locked when it is made. `table` is what lies in it.

    Raises ArenaError: what is wrong with the folder, or with what lies there. `lock` is bounded, `unlock` gives it
    back.
    """

    def __init__(self, run_dir: str | Path, name: str, geometry: Geometry, is_alive: Alive = alive) -> None:
        assert geometry.n_pages > 0
        self.path = Path(run_dir) / f"{name}{SUFFIX}"
        self._no_lock_before = 0.0
        size = table_bytes(geometry)
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            while not self._open(geometry, size, is_alive):
                pass
        except OSError as error:
            raise ArenaError(f"no shared arena of {size >> 20} MiB at {self.path}: {error.strerror}") from error

    def lock(self) -> bool:
        """False where another holds it for too long, or did a moment ago: do without."""
        if time.monotonic() < self._no_lock_before:
            return False
        if _locked(self._descriptor, LOCK_S):
            return True
        self._no_lock_before = time.monotonic() + RETRY_S
        return False

    def unlock(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def remove(self) -> None:
        """While it is locked."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Views of the table stay valid until they are dropped."""
        os.close(self._descriptor)

    def _open(self, geometry: Geometry, size: int, is_alive: Alive) -> bool:
        """False where the file was removed meanwhile: try again."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(self.path, flags, 0o600)
        try:
            if not _locked(self._descriptor, 60.0):
                raise ArenaError(f"{self.path}: locked by a process that hangs")
            if not self._is_current():
                os.close(self._descriptor)
                return False
            if not self._fits(geometry, is_alive):
                self._allocate(size)
            memory = mmap.mmap(self._descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            self.bytes: npt.NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)
            self.table = Table(geometry, self.bytes)
            _make(self.table)
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            raise
        return True

    def _allocate(self, size: int) -> None:
        try:
            os.ftruncate(self._descriptor, 0)
            os.posix_fallocate(self._descriptor, 0, size)
        except OSError:
            self.remove()
            raise

    def _is_current(self) -> bool:
        try:
            return os.stat(self.path).st_ino == os.fstat(self._descriptor).st_ino
        except FileNotFoundError:
            return False

    def _fits(self, geometry: Geometry, is_alive: Alive) -> bool:
        """Whether what lies there is such a table. Raises ArenaError where it is another's, in use."""
        image = np.frombuffer(os.pread(self._descriptor, HEAD_BYTES, 0).ljust(HEAD_BYTES, b"\0"), np.uint8)
        head = image[: HEADER.itemsize].view(HEADER)[0]
        if not head["made"]:
            return False
        if head["magic"] != MAGIC or head["version"] != VERSION:
            raise ArenaError(f"{self.path}: not of format version {VERSION}: remove it")
        there = Geometry(**{name: int(head[name]) for name in Geometry.__dataclass_fields__})
        if there == geometry and os.fstat(self._descriptor).st_size == table_bytes(geometry):
            return True
        workers = image[ALIGN_BYTES : ALIGN_BYTES + WORKERS * WORKER.itemsize].view(WORKER).tolist()
        if any(pid and is_alive(pid, started) for pid, started in workers):
            raise ArenaError(f"{self.path}: in use with {there}, not {geometry}: workers of one cluster share both")
        return False


def _make(table: Table) -> None:
    """Write the header of a new table; `made` last."""
    if table.get("made"):
        return
    table.header["magic"], table.header["version"] = MAGIC, VERSION
    for name in Geometry.__dataclass_fields__:
        table.set(name, getattr(table.geometry, name))
    table.free[:] = np.arange(table.geometry.n_pages - 1, -1, -1, dtype=np.int32)
    table.set("n_free", table.geometry.n_pages)
    table.set("made", 1)


def _locked(descriptor: int, timeout_s: float) -> bool:
    until, wait_s = time.monotonic() + timeout_s, 1e-5
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, 1e-3)
        else:
            return True

"""Bytes in shared memory: one file in a run folder, made and touched at start, removed at exit, swept when stale.

A file's name carries its owner's process id and that process's start time, and its owner holds a lock on it: `sweep`
removes a file only where both say that the owner is gone. Readers open the file by its path and read (`read`); an owner
that is killed takes nothing away from those that have it open. Not multiprocessing.shared_memory, whose tracker unlinks
the bytes when their maker dies.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
import weakref
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from forebay.kvstore.extents import Extents

SUFFIX = ".arena"


class ArenaError(Exception):
    """The run folder cannot be used, or has no room: the message says which, and how large the arena was to be."""


class Arena:
    """This process's own arena: `bytes` uint8 [n_bytes] shared with whoever opens `path`, `extents` says what is taken.

    A context manager; `close` is idempotent and also runs at the process's ordinary exit.
    """

    def __init__(self, run_dir: str | Path, name: str, n_bytes: int) -> None:
        assert n_bytes > 0
        folder = Path(run_dir)
        pid = os.getpid()
        self.path = str(folder / f"{name}-{secrets.token_hex(4)}.{pid}.{start_time(pid)}{SUFFIX}")
        self.extents = Extents(n_bytes)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = _make_file(self.path, n_bytes)
        except OSError as error:
            raise ArenaError(f"no arena of {n_bytes >> 20} MiB at {self.path}: {error.strerror}") from error
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(self._descriptor, n_bytes), dtype=np.uint8)
        self.bytes[:: mmap.PAGESIZE] = 0
        self._remove = weakref.finalize(self, _remove, self.path, self._descriptor, pid)

    def __enter__(self) -> "Arena":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the file. Views of `bytes` stay valid until they are dropped."""
        self._remove()


def read(path: str, offset: int, into: npt.NDArray[np.uint8]) -> bool:
    """Fill `into` from an arena of any process. False where the file is gone or ends before.

    A read into own memory, not a mapping: a file cut short under a mapping would kill the reader, and what was verified
    must be what is used.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return _read_all(descriptor, offset, into.data)
    finally:
        os.close(descriptor)


def sweep(run_dir: str | Path) -> list[str]:
    """Remove the arenas in `run_dir` whose owners are dead. Returns their paths."""
    swept = []
    for path in Path(run_dir).glob(f"*{SUFFIX}"):
        if _is_stale(path):
            path.unlink(missing_ok=True)
            swept.append(str(path))
    return swept


def _make_file(path: str, n_bytes: int) -> int:
    """Allocated in full now, so that a full folder is an error here and not a bus error at some later write."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(descriptor, 0, n_bytes)
    except OSError:
        os.unlink(path)
        os.close(descriptor)
        raise
    return descriptor


def _remove(path: str, descriptor: int, owner_pid: int) -> None:
    if os.getpid() != owner_pid:  # a forked child ends: the arena is still its parent's
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    os.close(descriptor)


def _read_all(descriptor: int, offset: int, into: memoryview) -> bool:
    while into:
        try:
            n_read = os.preadv(descriptor, [into], offset)
        except OSError:
            return False
        if n_read == 0:
            return False
        into, offset = into[n_read:], offset + n_read
    return True


def _is_stale(path: Path) -> bool:
    parts = path.name.removesuffix(SUFFIX).rsplit(".", 2)
    if len(parts) != 3 or not (parts[1].isdecimal() and parts[2].isdecimal()):
        return False
    return start_time(int(parts[1])) != int(parts[2]) and not _is_locked(path)


def _is_locked(path: Path) -> bool:
    """Also where it cannot be told: another user's file is not ours to remove."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def start_time(pid: int) -> int:
    """A process's start in clock ticks since boot (field 22 of its stat file), 0 where there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])

"""The thread that writes the log: it takes what waits, writes it in order, syncs once, then acknowledges all of it.

    queued (in memory, readable there) --written--> in the file --synced--> acknowledged

While one group is synced the next one gathers, so that a sync serves many records. What waits lies in one area of fixed
size, used over and over: fresh memory costs more than the copy into it. Who finds no room there is told so and does not
wait. After an error of the disk nothing is written any more.

Files are written with O_DIRECT where the file system grants it: what goes to the disk has been in use in the memory
above until now, and must neither be copied into the page cache nor push out what lies there. Elsewhere (tmpfs, some
network file systems) the same calls go through the page cache.
"""

import contextlib
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from forebay.kvstore.extents import Extents
from forebay.kvstore.log_folder import Bytes, LogFolder

GROUP_BYTES = 64 << 20
TOUCH_BYTES = 4 << 20
MADV_POPULATE_WRITE = 23
CLOSE_S = 30.0
"""How long `close` waits for a disk that hangs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Image:
    """Bytes on their way to the disk, `at` an offset of the area."""

    at: int
    bytes: Bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Write:
    """`image` goes to `offset` of `segment` once the `dropped` are removed. `last`: the highest sequence in it."""

    segment: int
    offset: int
    image: Image
    dropped: tuple[int, ...]
    last: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Change:
    """What is to be done to records in place (erase.py), `after` so many writes."""

    make: Callable[[LogFolder], None]
    after: int


class LogWriter:
    """`acknowledged`: all records up to this sequence are on the disk. `failure`: what ended the writing, or None."""

    def __init__(self, folder: LogFolder, queue_bytes: int) -> None:
        """`queue_bytes`: multiple of the record's alignment; nothing larger can be written."""
        self.acknowledged = -1
        self.failure: str | None = None
        self.syncs = 0
        self._folder = folder
        self._memory = mmap.mmap(-1, queue_bytes)
        self._area: Bytes = np.frombuffer(self._memory, dtype=np.uint8)
        self._extents = Extents(queue_bytes)
        self._queue: deque[Write] = deque()
        self._changes: deque[Change] = deque()
        self._n_put = self._n_written = 0
        self._waiting: dict[int, list[Write]] = {}
        self._queued_bytes = 0
        self._closing = False
        self._wake = threading.Condition()
        self._file: tuple[int, int] | None = None
        self._thread = threading.Thread(target=self._run, name="segment-log", daemon=True)
        self._thread.start()

    @property
    def queued_bytes(self) -> int:
        """Written, but not yet acknowledged."""
        return self._queued_bytes

    def take(self, n_bytes: int) -> Image | None:
        """Room for bytes that will be `put`, or given back by `give`; None where there is none."""
        with self._wake:
            at = self._extents.take(n_bytes) if self.failure is None else None
        return None if at is None else Image(at=at, bytes=self._area[at : at + n_bytes])

    def give(self, image: Image) -> None:
        with self._wake:
            self._extents.give(image.at)

    def put(self, write: Write) -> None:
        with self._wake:
            if self.failure is not None:
                return
            self._n_put += 1
            self._queue.append(write)
            self._waiting.setdefault(write.segment, []).append(write)
            self._queued_bytes += len(write.image.bytes)
            self._wake.notify_all()

    def change(self, make: Callable[[LogFolder], None]) -> None:
        """Change records in place, once all that was put until now is written. A file that is gone ends it."""
        with self._wake:
            if self.failure is None:
                self._changes.append(Change(make=make, after=self._n_put))
                self._wake.notify_all()

    def waiting(self, segment: int, offset: int, n_bytes: int) -> Bytes | None:
        """A copy of those bytes, while they are not acknowledged."""
        with self._wake:
            for write in self._waiting.get(segment, ()):
                start = offset - write.offset
                if 0 <= start < len(write.image.bytes):
                    return write.image.bytes[start : start + n_bytes].copy()
        return None

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was put is acknowledged, and changed. False where that does not come."""
        with self._wake:
            self._wake.wait_for(lambda: not self._is_behind or self.failure is not None, timeout_s)
            return not self._is_behind and self.failure is None

    @property
    def _is_behind(self) -> bool:
        return bool(self._queued_bytes or self._changes)

    def fail(self, why: str) -> None:
        """Nothing is written from now on; what waits is given up."""
        with self._wake:
            self.failure = self.failure or why
            self._queue.clear()
            self._changes.clear()
            self._waiting.clear()
            self._queued_bytes = 0
            self._wake.notify_all()

    def close(self) -> None:
        """Write what waits, then end."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        self._touch()
        while self._has_more():
            try:
                if group := self._next_group():
                    self._write(group)
                    self._acknowledge(group)
                self._make_changes()
            except OSError as error:
                self.fail(f"{self._folder.path}: {error.strerror}")
        with contextlib.suppress(OSError):  # what it holds was synced, or has failed already
            self._close_file()

    def _touch(self) -> None:
        """Have the area's pages made now, beside whoever fills it, and not one by one under the copies into it."""
        with contextlib.suppress(OSError):  # older kernels: then it is done under the copies
            for start in range(0, len(self._memory), TOUCH_BYTES):
                self._memory.madvise(MADV_POPULATE_WRITE, start, min(TOUCH_BYTES, len(self._memory) - start))

    def _has_more(self) -> bool:
        """Waits for something to do; False once nothing will come any more."""
        with self._wake:
            self._wake.wait_for(lambda: bool(self._queue or self._changes) or self._closing)
            return bool(self._queue or self._changes)

    def _make_changes(self) -> None:
        while (change := self._next_change()) is not None:
            with contextlib.suppress(FileNotFoundError):  # its segment made way for a newer one
                change.make(self._folder)
            with self._wake:
                if self._changes:
                    self._changes.popleft()
                self._wake.notify_all()

    def _next_change(self) -> Change | None:
        with self._wake:
            due = bool(self._changes) and self._changes[0].after <= self._n_written
            return self._changes[0] if due else None

    def _next_group(self) -> list[Write]:
        """What waits, up to GROUP_BYTES and at least one where there is one."""
        with self._wake:
            group: list[Write] = []
            while self._queue and sum(len(write.image.bytes) for write in group) < GROUP_BYTES:
                group.append(self._queue.popleft())
            return group

    def _write(self, group: list[Write]) -> None:
        changed = False
        for write in group:
            for segment in write.dropped:
                self._folder.remove(segment)
            changed |= bool(write.dropped) or self._file is None or self._file[0] != write.segment
            _write_all(self._open(write.segment), write.image.bytes, write.offset)
        self._sync()
        if changed:
            self._folder.sync()

    def _open(self, segment: int) -> int:
        """The segment's file. The one before is synced first: only the newest can hold what never was."""
        if self._file is not None and self._file[0] != segment:
            self._sync()
            self._close_file()
        if self._file is None:
            self._file = segment, _open_direct(str(self._folder.file(segment)))
        return self._file[1]

    def _sync(self) -> None:
        if self._file is not None:
            os.fdatasync(self._file[1])
            os.posix_fadvise(self._file[1], 0, 0, os.POSIX_FADV_DONTNEED)
            self.syncs += 1

    def _close_file(self) -> None:
        if self._file is not None:
            file, self._file = self._file[1], None
            os.close(file)

    def _acknowledge(self, group: list[Write]) -> None:
        with self._wake:
            if self.failure is not None:
                return
            for write in group:
                waiting = self._waiting[write.segment]
                waiting.remove(write)
                if not waiting:
                    del self._waiting[write.segment]
                self._queued_bytes -= len(write.image.bytes)
                self._extents.give(write.image.at)
            self._n_written += len(group)
            self.acknowledged = group[-1].last
            self._wake.notify_all()


def _open_direct(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:
        return os.open(path, flags, 0o600)


def _write_all(descriptor: int, image: Bytes, offset: int) -> None:
    rest = image.data
    while rest:
        written = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[written:], offset + written

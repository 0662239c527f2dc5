"""The folder of one log: its lock, its segment files, and the scan that finds the records in them again.

Only the owner can read what lies there. A lock refuses a second process for as long as the first one lives, however it
dies. Nothing here trusts what it reads: a header counts with its checksum, a record with all its bytes in the file.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

import numpy as np
import numpy.typing as npt

from forebay.kvstore.checksum import checksum
from forebay.kvstore.record import ALIGN_BYTES, MAGIC, Erased, NoRecord, OtherVersion, Record, header_bytes, unpack

SUFFIX = ".segment"
LOCK = "lock"
SEARCH_BYTES = 1 << 20
HEAD_BYTES = 4096

Harm = Literal["torn", "damaged", "other_version"]
Bytes = npt.NDArray[np.uint8]


class LogError(Exception):
    """The folder cannot be used. One line that says why."""


class LogBusy(LogError):
    """Another process has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A record's header and data: `n_bytes` from `offset` on, of which the last `data_bytes` are data."""

    segment: int
    offset: int
    n_bytes: int
    data_bytes: int
    checksum: int

    @property
    def total_bytes(self) -> int:
        """What the record takes, up to the next one."""
        return -(-self.n_bytes // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    place: Place
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Bytes [start, end) of a segment hold no record that can be used."""

    segment: int
    start: int
    end: int
    harm: Harm


@dataclass(frozen=True, slots=True, kw_only=True)
class Hole:
    """Bytes [start, end) of a segment held a record that was erased: zeros, unless that was interrupted."""

    segment: int
    start: int
    end: int


class LogFolder:
    """A context manager; holds the lock until `close`. Raises LogError."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LogError(f"{self.path}: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, str(os.getpid()).encode(), 0)
        except BlockingIOError:
            pid = os.pread(self._lock, 32, 0).decode(errors="replace")
            os.close(self._lock)
            raise LogBusy(f"{self.path}: in use by process {pid}") from None
        except OSError as error:
            os.close(self._lock)
            raise LogError(f"{self.path}: {error.strerror}") from None

    def __enter__(self) -> "LogFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def numbers(self) -> list[int]:
        """Segments, oldest first."""
        return numbers(self.path)

    def file(self, segment: int) -> Path:
        return file_of(self.path, segment)

    def remove(self, segment: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.file(segment).unlink()

    def sync(self) -> None:
        """What was made and removed in the folder stays so."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def numbers(path: Path) -> list[int]:
    """Segments of a folder, oldest first. Raises LogError where it cannot be read."""
    try:
        names = [name.removesuffix(SUFFIX) for name in os.listdir(path) if name.endswith(SUFFIX)]
    except OSError as error:
        raise LogError(f"{path}: {error.strerror}") from None
    return sorted(int(name, 16) for name in names if len(name) == 16 and not set(name) - set("0123456789abcdef"))


def file_of(path: Path, segment: int) -> Path:
    return path / f"{segment:016x}{SUFFIX}"


def room_bytes(place: Place) -> int:
    """What `read` needs of memory: the record as it lies in the file, and what aligning it may cost."""
    return (-(-place.n_bytes // ALIGN_BYTES) + 1) * ALIGN_BYTES


def read(path: Path, place: Place, into: Bytes) -> Bytes | None:
    """A record's data, verified, in a part of `into`, `room_bytes` long at least. None where it is not what was
    written.

    Past the page cache where the file system grants it: what comes up lives in memory above from now on. Raises OSError
    where the disk fails; a file that is gone or too short is no failure.
    """
    start = -into.ctypes.data % ALIGN_BYTES
    image = into[start : start + room_bytes(place) - ALIGN_BYTES]
    file = file_of(path, place.segment)
    try:
        whole = _read_direct(file, place, image) or _read_cached(file, place, image)
    except FileNotFoundError:
        return None
    data = image[place.n_bytes - place.data_bytes : place.n_bytes]
    return data if whole and checksum(data) == place.checksum else None


def _read_direct(file: Path, place: Place, image: Bytes) -> bool:
    """Whole blocks of the file into aligned memory. False where there are too few, or no such reads."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    try:
        return _read_blocks(descriptor, place, image)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    finally:
        os.close(descriptor)


def _read_cached(file: Path, place: Place, image: Bytes) -> bool:
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        whole = _read_blocks(descriptor, place, image)
        os.posix_fadvise(descriptor, place.offset, place.n_bytes, os.POSIX_FADV_DONTNEED)
        return whole
    finally:
        os.close(descriptor)


def _read_blocks(descriptor: int, place: Place, image: Bytes) -> bool:
    """Up to the record's end at least; False where the file ends before."""
    at = 0
    while at < place.n_bytes:
        n_read = os.preadv(descriptor, [image.data[at:]], place.offset + at)
        at += n_read
        if n_read % ALIGN_BYTES or not n_read:
            break
    return at >= place.n_bytes


def scan(path: Path, segment: int, *, verify: bool) -> Iterator[Found | Damage | Hole]:
    """All records of a segment in order, what was erased, and the stretches between that are neither. Raises OSError.

    Headers are always verified, data with `verify` alone. A segment whose first record is of another version is set
    aside whole. Zeros from a record's end on are damage too: nothing is ever left out while writing.
    """
    buffer = _Buffer() if verify else None
    try:
        descriptor = os.open(file_of(path, segment), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL if verify else os.POSIX_FADV_RANDOM)
        size, at = os.fstat(descriptor).st_size, 0
        while at < size:
            found = _record_at(descriptor, segment, at, size, buffer)
            yield found
            at = at + found.record.total_bytes if isinstance(found, Found) else found.end
    finally:
        os.close(descriptor)


def _record_at(descriptor: int, segment: int, at: int, size: int, buffer: "_Buffer | None") -> Found | Damage | Hole:
    try:
        record = _header_at(descriptor, at)
    except Erased as was:
        return Hole(segment=segment, start=at, end=min(at + was.total_bytes, size))
    except OtherVersion:
        end = size if at == 0 else _next_record(descriptor, at + ALIGN_BYTES, size)
        return Damage(segment=segment, start=at, end=end, harm="other_version")
    except NoRecord:
        end = _next_record(descriptor, at + ALIGN_BYTES, size)
        return Damage(segment=segment, start=at, end=end, harm="torn" if end == size else "damaged")
    place = place_of(record, segment, at)
    if at + place.n_bytes > size:
        end = _next_record(descriptor, at + ALIGN_BYTES, size)
        return Damage(segment=segment, start=at, end=end, harm="torn")
    if buffer is not None and not _is_intact(descriptor, place, buffer.of(place.n_bytes)):
        end = min(at + record.total_bytes, size)
        return Damage(segment=segment, start=at, end=end, harm="damaged")
    return Found(place=place, record=record)


def place_of(record: Record, segment: int, offset: int) -> Place:
    return Place(
        segment=segment,
        offset=offset,
        n_bytes=record.header_bytes + record.n_bytes,
        data_bytes=record.n_bytes,
        checksum=record.checksum,
    )


def _header_at(descriptor: int, at: int) -> Record:
    head = os.pread(descriptor, HEAD_BYTES, at)
    n_bytes = header_bytes(head)
    if n_bytes > len(head):
        head = os.pread(descriptor, n_bytes, at)
    if len(head) < n_bytes:
        raise NoRecord
    return unpack(head)


def _next_record(descriptor: int, at: int, size: int) -> int:
    """The next place that looks like a record's start and has its checksum; the file's end without one."""
    magic = np.frombuffer(MAGIC, dtype="<u4")[0]
    while at < size:
        chunk = os.pread(descriptor, SEARCH_BYTES, at)
        words = np.frombuffer(chunk[: len(chunk) // 4 * 4], dtype="<u4")[:: ALIGN_BYTES // 4]
        for index in np.flatnonzero(words == magic).tolist():
            found = int(at + index * ALIGN_BYTES)
            try:
                _header_at(descriptor, found)
            except Erased:
                return found
            except NoRecord:
                continue
            return found
        at += SEARCH_BYTES
    return size


class _Buffer:
    """One piece of memory for all records of a scan: fresh memory for each costs more than the reading."""

    def __init__(self) -> None:
        self._bytes: Bytes = np.empty(0, dtype=np.uint8)

    def of(self, n_bytes: int) -> Bytes:
        if len(self._bytes) < n_bytes:
            self._bytes = np.empty(n_bytes, dtype=np.uint8)
        return self._bytes[:n_bytes]


def _is_intact(descriptor: int, place: Place, image: Bytes) -> bool:
    whole = _read_all(descriptor, place.offset, image.data)
    return whole and checksum(image[place.n_bytes - place.data_bytes :]) == place.checksum


def _read_all(descriptor: int, offset: int, into: memoryview) -> bool:
    while into:
        n_read = os.preadv(descriptor, [into], offset)
        if n_read == 0:
            return False
        into, offset = into[n_read:], offset + n_read
    return True

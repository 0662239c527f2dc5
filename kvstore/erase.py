"""Records change in place: erased for good, or marked as used by several sessions. File functions only.

    1. the erased record's header takes the place of its own: one write of 64 bytes, so it is there or it is not
    2. what the header was, and the data, become zeros, and their room on the disk is given back where it can be

Whoever is killed in between leaves an erased record whose bytes are still there: `finish` does step 2 again, for as
long as nobody knows that it was done. Nobody can hit it from step 1 on.
"""

import ctypes
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from forebay.kvstore.log_folder import Found, Hole, file_of, scan
from forebay.kvstore.record import ALIGN_BYTES, HEADER_ALIGN_BYTES, SHARED, STATE_AT, erased

KEEP_SIZE, PUNCH_HOLE = 1, 2
ZEROS = bytes(1 << 20)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def erase(path: Path, records: Iterable[tuple[int, int]]) -> None:
    """Records of one segment file, by (offset, total bytes). Raises OSError."""
    records = list(records)
    with _opened(path) as descriptor:
        for offset, total_bytes in records:
            _write(descriptor, erased(total_bytes), offset)
        os.fdatasync(descriptor)
        _wipe(descriptor, records)


def purge(path: Path, segment: int, session: bytes | None, tenant: bytes | None, upto: int) -> list[Found]:
    """Erase all records of a segment that are the session's alone, or the tenant's (`moves.mark_of`), up to this
    sequence number; also what an earlier call was interrupted in. Which ones. Raises OSError."""
    each = list(scan(path, segment, verify=False))
    found = [one for one in each if isinstance(one, Found) and one.record.sequence <= upto]
    owned = [one for one in found if one.record.label.origin.belongs_to(session, tenant)]
    if owned:
        erase(file_of(path, segment), [(one.place.offset, one.place.total_bytes) for one in owned])
    if holes := [(one.start, one.end - one.start) for one in each if isinstance(one, Hole)]:
        finish(file_of(path, segment), holes)
    return owned


def finish(path: Path, records: Iterable[tuple[int, int]]) -> None:
    """Step 2 of records that are erased. Raises OSError."""
    with _opened(path) as descriptor:
        _wipe(descriptor, list(records))


def share(path: Path, offsets: Iterable[int]) -> None:
    """Records that several sessions use now. Raises OSError."""
    with _opened(path) as descriptor:
        for offset in offsets:
            _write(descriptor, SHARED, offset + STATE_AT)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """The file's descriptor, to write through the page cache."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _wipe(descriptor: int, records: list[tuple[int, int]]) -> None:
    for offset, total_bytes in records:
        start, end = offset + HEADER_ALIGN_BYTES, offset + total_bytes
        hole = min(offset + ALIGN_BYTES, end)
        _write(descriptor, bytes(hole - start), start)
        if hole < end and _libc.fallocate(descriptor, KEEP_SIZE | PUNCH_HOLE, hole, end - hole):
            for at in range(hole, end, len(ZEROS)):  # a file system without holes
                _write(descriptor, ZEROS[: end - at], at)
    os.fdatasync(descriptor)


def _write(descriptor: int, image: bytes, offset: int) -> None:
    """Never beyond the file's end: what was cut off there stays away."""
    rest = memoryview(image)[: max(0, os.fstat(descriptor).st_size - offset)]
    while rest:
        written = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[written:], offset + written

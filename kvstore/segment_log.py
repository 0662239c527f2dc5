"""The append-only log of records on disk: what is appended can be read at once, and is there after a restart.

    log.append(parts, pinned) -> Places    in memory and on their way; None: skipped, since the queue or the log is full
    log.fetch(place) -> Future             the data, verified, or None where it is not what was appended
    log.take_dropped() -> segments         given up for newer ones: their records are gone
    log.failure                            the disk failed: nothing is written or read any more

A restart scans: every header, and the data of the newest segment, the only one that can hold what was never synced. The
data of the others is verified when it is read, so that a start does not read the whole disk. One thread at a time
calls; files are written and read in threads of their own.
"""

import contextlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from forebay.kvstore.checksum import copy_checked
from forebay.kvstore.erase import erase, finish, purge, share
from forebay.kvstore.log_folder import (
    Bytes,
    Found,
    Harm,
    Hole,
    LogError,
    LogFolder,
    Place,
    place_of,
    read,
    room_bytes,
    scan,
)
from forebay.kvstore.log_writer import LogWriter, Write
from forebay.kvstore.moves import Label
from forebay.kvstore.record import Record, pack
from forebay.kvstore.segments import Segments

READERS = 2
"""One verifies what it has read while the other one reads."""

SPARES = 8

LogEvent = Literal["skipped", "failed"] | Harm
"""skipped: a write, since the queue or the log was full. failed: the disk; the tier is off. The others: at a scan."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """One record to be: `data` uint8 [rows, row bytes], C-contiguous or not."""

    label: Label
    data: Bytes


class SegmentLog:
    """Raises LogError where the folder cannot be used. `found`: records that were there, oldest first."""

    def __init__(
        self, path: str | Path, *, quota_bytes: int, segment_bytes: int, queue_bytes: int, fingerprint: bytes
    ) -> None:
        self.events: Counter[LogEvent] = Counter()
        self.segments = Segments(quota_bytes, segment_bytes)
        self._fingerprint = fingerprint
        self._folder = LogFolder(path)
        self._dropped: list[int] = []
        try:
            self.found = self._recover()
        except OSError as error:
            self._folder.close()
            raise LogError(f"{path}: {error.strerror}") from None
        self._sequence = max((found.record.sequence for found in self.found), default=-1) + 1
        self._writer = LogWriter(self._folder, queue_bytes)
        self._spare: deque[Bytes] = deque(maxlen=SPARES)
        self._readers = ThreadPoolExecutor(max_workers=READERS, thread_name_prefix="segment-log-read")

    @property
    def failure(self) -> str | None:
        return self._writer.failure

    @property
    def acknowledged(self) -> int:
        """Records up to this sequence number are safe on the disk."""
        return self._writer.acknowledged

    @property
    def queued_bytes(self) -> int:
        return self._writer.queued_bytes

    @property
    def syncs(self) -> int:
        return self._writer.syncs

    def append(self, parts: Sequence[Part], pinned: Callable[[], Container[int]]) -> list[Place] | None:
        """One unit's records, in one segment. `pinned`: segments that are being read and must stay."""
        records = [self._record(number, parts) for number in range(len(parts))]
        n_bytes = sum(record.total_bytes for record in records)
        image = self._writer.take(n_bytes)
        placed = self.segments.place(n_bytes, pinned) if image is not None else None
        if image is None or placed is None:
            if image is not None:
                self._writer.give(image)
            self.events["skipped"] += self.failure is None
            return None
        places = []
        at = 0
        for record, part in zip(records, parts, strict=True):
            places.append(self._lay_out(record, part.data, image.bytes, at, placed.segment, placed.offset + at))
            at += record.total_bytes
        self._sequence += len(parts)
        self._dropped += placed.dropped
        self._writer.put(
            Write(
                segment=placed.segment,
                offset=placed.offset,
                image=image,
                dropped=placed.dropped,
                last=self._sequence - 1,
            )
        )
        return places

    def fetch(self, place: Place) -> "Future[Bytes | None]":
        """The record's data; from memory while it is on its way to the disk."""
        self.segments.use(place.segment)
        waiting = self._writer.waiting(place.segment, place.offset, place.n_bytes)
        if waiting is None:
            return self._readers.submit(self._read, place)
        done: Future[Bytes | None] = Future()
        done.set_result(waiting[place.n_bytes - place.data_bytes :])
        return done

    def give_back(self, data: Bytes) -> None:
        """What `fetch` brought is not needed any more: its memory serves the next read."""
        if isinstance(data.base, np.ndarray):
            self._spare.append(data.base)

    def erase(self, places: Iterable[Place]) -> None:
        """These records are gone for good, as soon as the disk has taken it."""
        for segment, records in _by_segment(places).items():
            self._writer.change(partial(_erase, segment, records))

    def share(self, places: Iterable[Place]) -> None:
        """Several sessions use these records now."""
        for segment, records in _by_segment(places).items():
            self._writer.change(partial(_share, segment, records))

    def purge(self, session: bytes | None, tenant: bytes | None) -> None:
        """All records so far of this session alone, or of this tenant, known or not, are gone for good, as soon as the
        disk has taken it."""
        for segment in sorted(self.segments.held):
            self._writer.change(partial(_purge, segment, session, tenant, self._sequence - 1))

    def take_dropped(self) -> list[int]:
        dropped, self._dropped = self._dropped, []
        return dropped

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything appended is acknowledged. False where that does not come."""
        return self._writer.flush(timeout_s)

    def close(self) -> None:
        """Write what waits, then let the folder go."""
        self._readers.shutdown(cancel_futures=True)
        self._writer.close()
        self._folder.close()

    def _record(self, number: int, parts: Sequence[Part]) -> Record:
        """Without its checksum: nothing is read before there is a place for it."""
        data = parts[number].data
        return Record(
            label=parts[number].label,
            fingerprint=self._fingerprint,
            part=number,
            parts=len(parts),
            rows=len(data),
            n_bytes=data.nbytes,
            checksum=0,
            sequence=self._sequence + number,
        )

    def _lay_out(self, record: Record, data: Bytes, image: Bytes, at: int, segment: int, offset: int) -> Place:
        """Write header and data into the image; the checksum is taken of what arrived there."""
        start = at + record.header_bytes
        target = image[start : start + record.n_bytes]
        record = replace(record, checksum=copy_checked(target.reshape(data.shape), data))
        image[start + record.n_bytes : at + record.total_bytes] = 0
        image[at:start] = np.frombuffer(pack(record), dtype=np.uint8)
        return place_of(record, segment, offset)

    def _read(self, place: Place) -> Bytes | None:
        """In the reading thread."""
        if self.failure is not None:
            return None
        try:
            return read(self._folder.path, place, self._room(room_bytes(place)))
        except OSError as error:
            self._writer.fail(f"{self._folder.path}: {error.strerror}")
            return None

    def _room(self, n_bytes: int) -> Bytes:
        """Memory for a read: one that was given back, or fresh, which costs more than the reading itself."""
        with contextlib.suppress(IndexError):  # none is left, or another reader took the last one
            while True:
                spare = self._spare.popleft()
                if len(spare) >= n_bytes:
                    return spare
        return np.empty(n_bytes, dtype=np.uint8)

    def _recover(self) -> list[Found]:
        for number in self._folder.numbers():
            self.segments.adopt(number, self._folder.file(number).stat().st_size)
        for number in self.segments.fit():
            self._folder.remove(number)
        found: list[Found] = []
        holes: dict[int, list[tuple[int, int]]] = defaultdict(list)
        newest = max(self.segments.held, default=None)
        for number in sorted(self.segments.held):
            for each in scan(self._folder.path, number, verify=number == newest):
                if isinstance(each, Found):
                    found.append(each)
                elif isinstance(each, Hole):
                    holes[number].append((each.start, each.end - each.start))
                else:
                    self.events[each.harm] += 1
        for number, records in holes.items():  # who was killed while erasing had perhaps not come to the end
            finish(self._folder.file(number), records)
        return sorted(found, key=lambda each: each.record.sequence)


def _erase(segment: int, records: Sequence[tuple[int, int]], folder: LogFolder) -> None:
    erase(folder.file(segment), records)


def _share(segment: int, records: Sequence[tuple[int, int]], folder: LogFolder) -> None:
    share(folder.file(segment), [offset for offset, _ in records])


def _purge(segment: int, session: bytes | None, tenant: bytes | None, upto: int, folder: LogFolder) -> None:
    purge(folder.path, segment, session, tenant, upto)


def _by_segment(places: Iterable[Place]) -> dict[int, list[tuple[int, int]]]:
    """(Offset, total bytes) of records."""
    by_segment: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for place in places:
        by_segment[place.segment].append((place.offset, place.total_bytes))
    return by_segment

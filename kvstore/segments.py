"""Where records lie in the log, and which segments make way for new ones. Byte accounting only: no file is touched.

    oldest use                                              latest
    [ segment ][ segment ] ... [ segment ]   [ open segment: appended to ]

The bytes of all segments never exceed the quota: segments are dropped whole, the longest unused first, before a record
is placed that would not fit. A use of any of its records renews a segment; the count of uses is the only clock.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Segment:
    n_bytes: int = 0
    used_at: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """`offset` in `segment`; `dropped` segments are to be removed before anything is written there."""

    segment: int
    offset: int
    dropped: tuple[int, ...]


class Segments:
    def __init__(self, quota_bytes: int, segment_bytes: int) -> None:
        assert 2 * segment_bytes <= quota_bytes, "one segment is dropped while another is written"
        self.quota_bytes = quota_bytes
        self.segment_bytes = segment_bytes
        self.held: dict[int, Segment] = {}
        self.n_bytes = 0
        self._open: int | None = None
        self._next = 0
        self._uses = 0

    def adopt(self, number: int, n_bytes: int) -> None:
        """A segment that an earlier process left, in order of numbers: it counts, and is not appended to."""
        self.held[number] = Segment(n_bytes=n_bytes, used_at=self._tick())
        self.n_bytes += n_bytes
        self._next = max(self._next, number + 1)

    def fit(self) -> tuple[int, ...]:
        """Drop until the quota holds: it may be smaller than the one that adopted segments were written under."""
        return self._make_way(0, pinned=())

    def use(self, number: int) -> None:
        if number in self.held:
            self.held[number].used_at = self._tick()

    def place(self, n_bytes: int, pinned: Callable[[], Container[int]]) -> Placed | None:
        """Room for `n_bytes` contiguous bytes. None, and nothing changed, where the segments in `pinned` leave none."""
        if n_bytes > self.segment_bytes:
            return None
        if self._open is not None and self.held[self._open].n_bytes + n_bytes > self.segment_bytes:
            self._open = None
        missing = self.n_bytes + n_bytes > self.quota_bytes
        if missing and not self._can_make_way(n_bytes, kept := pinned()):
            return None
        dropped = self._make_way(n_bytes, kept) if missing else ()
        if self._open is None:
            self._open, self._next = self._next, self._next + 1
            self.held[self._open] = Segment()
        segment = self.held[self._open]
        offset, segment.n_bytes = segment.n_bytes, segment.n_bytes + n_bytes
        segment.used_at = self._tick()
        self.n_bytes += n_bytes
        return Placed(segment=self._open, offset=offset, dropped=dropped)

    def check(self) -> None:
        assert self.n_bytes == sum(segment.n_bytes for segment in self.held.values()) <= self.quota_bytes
        assert self._open is None or self._open in self.held

    def _can_make_way(self, n_bytes: int, pinned: Container[int]) -> bool:
        kept = sum(each.n_bytes for number, each in self.held.items() if number in pinned or number == self._open)
        return kept + n_bytes <= self.quota_bytes

    def _make_way(self, n_bytes: int, pinned: Container[int]) -> tuple[int, ...]:
        dropped = []
        for number in sorted(self.held, key=lambda number: self.held[number].used_at):
            if self.n_bytes + n_bytes <= self.quota_bytes:
                break
            if number != self._open and number not in pinned:
                self.n_bytes -= self.held.pop(number).n_bytes
                dropped.append(number)
        return tuple(dropped)

    def _tick(self) -> int:
        self._uses += 1
        return self._uses

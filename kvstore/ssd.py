"""The SSD tier's bytes: which record of the log holds which pages of the tier, down into it and up again.

A page of this tier is a number only: one row of a record. A unit's pages lie in one segment, so what a segment's end
takes along are whole units. Everything goes down in one copy and is verified when it comes up.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np

from forebay.kvstore.chain import Chain
from forebay.kvstore.layout import Layout
from forebay.kvstore.log_folder import Bytes, Found, Place
from forebay.kvstore.lookup import STATES
from forebay.kvstore.moves import Label, Move, Pages, Tier
from forebay.kvstore.opening import Target
from forebay.kvstore.segment_log import Part, SegmentLog

Adopt = Callable[[Tier, Label], Pages | None]
"""`Store.adopt`."""

AHEAD_BYTES = 256 << 20
"""How much of one restore is read before its target has taken it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    place: Place
    rows: int
    row: int


class SsdPool:
    """`save` and `restore` carry out moves. `lost`: pages whose bytes will not or no longer be there; taken by
    `take_lost`."""

    tier: Tier = "ssd"

    def __init__(self, log: SegmentLog, layout: Layout) -> None:
        self.log = log
        self._layout = layout
        self._rows: dict[int, _Row] = {}
        self._in_segment: dict[int, set[int]] = defaultdict(set)
        self._lost: list[int] = []

    def save(self, move: Move, data: Bytes, pinned: Callable[[], Iterable[int]]) -> None:
        """Queue a unit's bytes, [pages, n_bytes]. `pinned`: pages of the tier whose segments must stay."""
        assert move.label is not None
        parts = self._parts(move.label, data)
        places = self.log.append(
            parts, lambda: {self._rows[page].place.segment for page in pinned() if page in self._rows}
        )
        for segment in self.log.take_dropped():
            for page in self._in_segment.pop(segment, ()):
                del self._rows[page]
                self._lost.append(page)
        if places is None:
            self._lost += move.target_pages.tolist()
            return
        first = 0
        for place, part in zip(places, parts, strict=True):
            self._note(place, move.target_pages[first : first + len(part.data)])
            first += len(part.data)

    def lose(self, move: Move) -> None:
        """What this move should have saved is not there to be saved."""
        self._lost += move.target_pages.tolist()

    def restore(self, target: Target, moves: Iterable[Move], ahead_bytes: int) -> "Restore":
        return Restore(self.log, target, [part for move in moves for part in self._by_record(move)], ahead_bytes)

    def erase(self, pages: Iterable[int]) -> None:
        """What lies there is gone for good, in records that hold nothing else."""
        self.log.erase(self._places(pages))
        for page in pages:
            if (row := self._rows.pop(page, None)) is not None:
                self._in_segment[row.place.segment].discard(page)

    def share(self, pages: Iterable[int]) -> None:
        """Several sessions use what lies there."""
        self.log.share(self._places(pages))

    def _places(self, pages: Iterable[int]) -> list[Place]:
        rows = [self._rows[page] for page in pages if page in self._rows]
        return list({(row.place.segment, row.place.offset): row.place for row in rows}.values())

    def take_lost(self) -> list[int]:
        lost, self._lost = self._lost, []
        return lost

    def discover(self, chain: Chain, adopt: Adopt) -> None:
        """Nobody else writes here."""

    def recover(self, fingerprint: bytes, adopt: Adopt) -> None:
        """Enter what an earlier process left, oldest first. `adopt` gives it pages, or None where it is not wanted."""
        checkpoints: dict[bytes, dict[int, Found]] = defaultdict(dict)
        for found in self.log.found:
            record = found.record
            if record.fingerprint != fingerprint:
                continue
            if self._is_span(found) and (pages := adopt("ssd", record.label)) is not None:
                self._note(found.place, pages)
            elif self._is_state(found):
                checkpoints[record.label.keys[0]][record.part] = found
        for parts in checkpoints.values():
            whole = [parts[number] for number in sorted(parts)]
            if len(whole) < len(self._layout.states):
                continue  # all or none
            if (pages := adopt("ssd", replace(whole[0].record.label, group=STATES))) is not None:
                first = 0
                for found in whole:
                    self._note(found.place, pages[first : first + found.record.rows])
                    first += found.record.rows
        self.log.found = []

    def close(self) -> None:
        self.log.close()

    def _parts(self, label: Label, data: Bytes) -> list[Part]:
        """A record a group: rows are of one, a checkpoint's states of all KDA groups in layout order."""
        if label.group != STATES:
            return [Part(label=label, data=data)]
        ends = np.cumsum([len(group.layers) for group in self._layout.states])[:-1].tolist()
        split = zip(self._layout.states, np.split(data, ends), strict=True)
        return [Part(label=replace(label, group=group.name), data=states) for group, states in split]

    def _note(self, place: Place, pages: Pages) -> None:
        for row, page in enumerate(pages.tolist()):
            before = self._rows.get(page)
            if before is not None:
                self._in_segment[before.place.segment].discard(page)
            self._rows[page] = _Row(place=place, rows=len(pages), row=row)
            self._in_segment[place.segment].add(page)

    def _by_record(self, move: Move) -> list["_Reading"]:
        """The parts of a move up, one for each record; pages that are nowhere are one of their own."""
        parts: dict[tuple[int, int], list[int]] = defaultdict(list)
        rows = [self._rows.get(page) for page in move.source_pages.tolist()]
        for index, row in enumerate(rows):
            parts[(row.place.segment, row.place.offset) if row else (-1, -1)].append(index)
        return [
            _Reading(
                place=None if (first := rows[at[0]]) is None else first.place,
                rows=0 if first is None else first.rows,
                taken=[row.row for index in at if (row := rows[index]) is not None],
                source_pages=move.source_pages[at],
                target_pages=move.target_pages[at],
                n_bytes=move.n_bytes,
            )
            for at in parts.values()
        ]

    def _is_span(self, found: Found) -> bool:
        """Of a shape that this layout gives it: what is on the disk is believed no more than that."""
        record, block = found.record, self._layout.block_tokens
        for group in self._layout.paged:
            if group.name == record.label.group:
                n_keys, start = len(record.label.keys), record.label.start_tokens
                return (
                    record.parts == 1
                    and record.rows == len(group.layers)
                    and record.n_bytes == record.rows * n_keys * block * group.row_bytes
                    and 0 < n_keys <= group.page_tokens // block
                    and start % group.page_tokens == 0
                )
        return False

    def _is_state(self, found: Found) -> bool:
        record, states = found.record, self._layout.states
        if record.parts != len(states) or record.part >= len(states) or len(record.label.keys) != 1:
            return False
        group = states[record.part]
        return (
            record.label.group == group.name
            and record.rows == len(group.layers)
            and record.n_bytes == record.rows * group.state_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Reading:
    """The `taken` rows of a record of `rows` rows go to `target_pages`, the first `n_bytes` of each."""

    place: Place | None
    rows: int
    taken: list[int]
    source_pages: Pages
    target_pages: Pages
    n_bytes: int


class Restore:
    """The reads of one request. `advance` until it is True; then all has arrived, or `wrong` pages could not."""

    tier: Tier = "ssd"

    def __init__(self, log: SegmentLog, target: Target, readings: list[_Reading], ahead_bytes: int) -> None:
        self.wrong: list[int] = []
        self.gone: list[int] = []
        self._log = log
        self._target = target
        self._ahead_bytes = ahead_bytes
        self._to_read = readings[::-1]
        self._reading: list[tuple[_Reading, Future[Bytes | None]]] = []
        self._read_on()

    def advance(self) -> bool:
        """Copy up what has been read, verified. True once nothing more comes."""
        while self._reading and self._reading[0][1].done():
            reading, read = self._reading.pop(0)
            self._take(reading, read.result())
            self._read_on()
        return not self._reading

    def wait(self, timeout_s: float | None) -> None:
        """Until `advance` has something to do."""
        if self._reading:
            wait([self._reading[0][1]], timeout_s, FIRST_COMPLETED)

    def _take(self, reading: _Reading, data: Bytes | None) -> None:
        if data is None:
            self.wrong += reading.source_pages.tolist()
            self._to_read.clear()
        else:
            rows = data.reshape(reading.rows, -1)
            self._target.scatter(reading.target_pages, rows[reading.taken, : reading.n_bytes])
            self._log.give_back(data)

    def _read_on(self) -> None:
        """Ask for more, as far as the bound on what is read ahead allows."""
        ahead = sum(reading.place.n_bytes for reading, _ in self._reading if reading.place is not None)
        while self._to_read and ahead < self._ahead_bytes:
            reading = self._to_read.pop()
            self._reading.append((reading, self._fetch(reading.place)))
            ahead += reading.place.n_bytes if reading.place is not None else 0

    def _fetch(self, place: Place | None) -> "Future[Bytes | None]":
        if place is not None:
            return self._log.fetch(place)
        nowhere: Future[Bytes | None] = Future()
        nowhere.set_result(None)
        return nowhere


def model_mark(fingerprint: str) -> bytes:
    """The 32 bytes that stand for a model's fingerprint in every record."""
    return blake2b(fingerprint.encode(), digest_size=32).digest()

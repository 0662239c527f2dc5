"""The host tier's bytes: one worker's view of the units that all workers of its node and cluster share.

A page of this tier is a number only: it stands for one page of an entry of the directory, as that was when it was
noted. What another worker stored is adopted, what is gone is lost; a restore that finds its entry gone or its bytes
wrong says so.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from forebay.kvstore.chain import Chain
from forebay.kvstore.checksum import copy_checked
from forebay.kvstore.device import DevicePool
from forebay.kvstore.directory import Directory, Leaving
from forebay.kvstore.layout import Layout
from forebay.kvstore.lookup import STATES
from forebay.kvstore.moves import Label, Move, Pages, Tier
from forebay.kvstore.shared_entries import Place, Stored, Unit
from forebay.kvstore.ssd import Adopt

Bytes = npt.NDArray[np.uint8]
Rows = Callable[[], Bytes | None]
Spill = Callable[[Label, int, float, Rows], None]
"""Takes a unit that leaves memory: its label, how often it was used, until when it is kept, and what reads its pages'
bytes [pages, n_bytes], which costs a copy; None where they are wrong."""

TRIES = 4
"""How often room is made for one unit, where others take it meanwhile."""


class HostPool:
    """`save` and `restore` carry out moves, inside `reading` of all of them. `model` marks whose entries are its own.

    States are of one rank of `ranks`; rows are the same for all ranks, so they are stored once.
    """

    tier: Tier = "host"

    def __init__(
        self,
        directory: Directory,
        layout: Layout,
        model: bytes,
        *,
        n_pages: int,
        rank: int,
        ranks: int,
        unpin: Callable[[], None] = lambda: None,
    ) -> None:
        """`n_pages`: numbers of this worker's view. `unpin`: what is to be called at the end."""
        self.directory = directory
        self._layout = layout
        self._model = model
        self._states = f"{STATES} {rank} of {ranks}"
        self._entry = np.full(n_pages, -1, dtype=np.int64)
        self._serial = np.zeros(n_pages, dtype=np.uint64)
        self._row = np.zeros(n_pages, dtype=np.int64)
        self._unpin = unpin
        self._read: dict[int, int] = {}
        self._seen = 0
        self._lost: list[int] = []
        self._found: list[Stored] = []

    @contextmanager
    def reading(self, moves: Sequence[Move]) -> Iterator[None]:
        """What these moves read stays, as far as it is there, until they were carried out."""
        pages = [move.source_pages for move in moves if move.source == "host"]
        noted = np.concatenate(pages)[self._entry[np.concatenate(pages)] >= 0] if pages else np.empty(0, np.int32)
        entries, first = np.unique(self._entry[noted], return_index=True)
        if len(entries):
            until = max(move.expires_at for move in moves if move.source == "host")
            there = self.directory.pin(entries, self._serial[noted[first]], until)
            entries = entries[there]
            self._read = dict(zip(entries.tolist(), self._serial[noted[first]][there].tolist(), strict=True))
        try:
            yield
        finally:
            if self._read:
                self._read = {}
                self.directory.unpin(entries)

    def save(self, device: DevicePool, move: Move, spill: Spill | None) -> None:
        """Copy a unit down, unless it is there already. What it takes the place of, or the unit itself where there is
        none, goes to `spill`."""
        unit = self._unit(move)
        answer = self._room(unit, spill)
        if isinstance(answer, Place):
            answer = self._copy_down(device, move, answer)
        if answer is None:
            self.lose(move)
            if spill is not None:
                assert move.label is not None
                read = partial(device.gather, move.source_pages, move.n_bytes)
                spill(move.label, move.uses, move.expires_at, read)
        else:
            self._note(move.target_pages, answer)

    def claim(self, move: Move, spill: Spill | None) -> Place | None:
        """Room for a unit that comes up from below, to be published. None where it is here already, or has no room."""
        answer = self._room(self._unit(move), spill)
        return answer if isinstance(answer, Place) else None

    def restore(self, device: DevicePool, move: Move) -> list[int]:
        """Copy pages up: returns those that are gone or whose bytes are not what was saved, [] where all arrived."""
        wrong = []
        for page, target in zip(move.source_pages.tolist(), move.target_pages.tolist(), strict=True):
            if not self._copy_up(device, page, target, move.n_bytes):
                wrong.append(page)
        return wrong

    def read(self, move: Move) -> Bytes | None:
        """A copy of the pages that go further down, [n, n_bytes]; None where one is not what was saved."""
        data = np.empty((len(move.source_pages), move.n_bytes), dtype=np.uint8)
        for row, page in zip(data, move.source_pages.tolist(), strict=True):
            source = self._granule(page)
            if (
                source is None
                or len(source) != move.n_bytes
                or self._sum(page) != copy_checked(row[None], source[None])
            ):
                return None
        return data

    def lose(self, move: Move) -> None:
        """What this move should have saved is not there."""
        self._entry[move.target_pages] = -1
        self._lost += move.target_pages.tolist()

    def take_lost(self) -> list[int]:
        changes = self.directory.changes(self._seen)
        if changes is not None:
            self._seen = changes.upto
            serials = self.directory.table.serial
            noted = np.flatnonzero(np.isin(self._entry, changes.entries))
            gone = noted[serials[self._entry[noted]] != self._serial[noted]]
            self._entry[gone] = -1
            self._lost += gone.tolist()
            self._found += [stored for stored in changes.arrived if self._is_ours(stored.unit)]
        lost, self._lost = self._lost, []
        return lost

    def discover(self, chain: Chain, adopt: Adopt) -> None:
        """All that was stored since the last call, of any prompt, and is there still."""
        found, self._found = self._found, []
        for stored in sorted(found, key=lambda stored: stored.unit.label.end_tokens):
            if self.directory.table.serial[stored.entry] != stored.serial:
                continue
            label = stored.unit.label
            pages = adopt("host", label if stored.unit.rows else replace(label, group=STATES))
            if pages is not None:
                self._note(pages, stored)

    def share(self, pages: Sequence[int]) -> None:
        """Several sessions use what these pages stand for."""
        if entries := self._noted(pages):
            self.directory.share(entries)

    def erase(self, pages: Sequence[int]) -> None:
        """What these pages stand for is not to be found by anybody."""
        for entry, serial in self._noted(pages):
            self.directory.discard(entry, serial)

    def granule(self, page: int) -> Bytes:
        """The bytes that a page of this tier stands for."""
        table = self.directory.table
        bytes_there: Bytes = table.granules[table.pages[self._entry[page], self._row[page]]]
        return bytes_there

    def close(self) -> None:
        self._unpin()
        self.directory.close()

    def _unit(self, move: Move) -> Unit:
        assert move.label is not None, "a move down has its unit's label"
        rows = move.label.group != STATES
        return Unit(
            model=self._model,
            label=move.label if rows else replace(move.label, group=self._states),
            rows=rows,
            n_pages=len(move.target_pages),
            n_bytes=move.n_bytes,
            worth=move.worth,
            uses=move.uses,
            expires_at=move.expires_at,
        )

    def _room(self, unit: Unit, spill: Spill | None) -> Place | Stored | None:
        left: list[int] = []
        for _ in range(TRIES):
            answer = self.directory.put(unit, spill=spill is not None, left=left)
            if not isinstance(answer, Leaving):
                return answer
            assert spill is not None
            for stored in answer.units:
                self._spill(stored, spill)
            left = [stored.entry for stored in answer.units]
        self.directory.give_up(left)
        return None

    def _spill(self, stored: Stored, spill: Spill) -> None:
        """Let a unit of this model and rank go further down."""
        unit = stored.unit
        if self._is_ours(unit):
            label = unit.label if unit.rows else replace(unit.label, group=STATES)
            spill(label, unit.uses, unit.expires_at, partial(self._leaving, stored))

    def _leaving(self, stored: Stored) -> Bytes | None:
        """A copy of what leaves, if its bytes are right."""
        unit, table = stored.unit, self.directory.table
        data = np.empty((unit.n_pages, unit.n_bytes), dtype=np.uint8)
        pages = table.pages_of(stored.entry).tolist()
        sums = [
            copy_checked(row[None], table.granules[page, None, : unit.n_bytes])
            for row, page in zip(data, pages, strict=True)
        ]
        return data if sums == table.checksums[stored.entry, : unit.n_pages].tolist() else None

    def _copy_down(self, device: DevicePool, move: Move, place: Place) -> Stored | None:
        granules = self.directory.table.granules
        try:
            sums = [
                device.take(page, granules[granule, : move.n_bytes])
                for page, granule in zip(move.source_pages.tolist(), place.granules.tolist(), strict=True)
            ]
        except BaseException:
            self.directory.give_up([place.entry])
            raise
        return self.directory.publish(place, sums)

    def _copy_up(self, device: DevicePool, page: int, target: int, n_bytes: int) -> bool:
        source = self._granule(page)
        if source is None or n_bytes > len(source):
            return False
        return device.bring(target, source, n_bytes) == self._sum(page)

    def _granule(self, page: int) -> Bytes | None:
        """What was stored there, if it was there when reading began."""
        entry = int(self._entry[page])
        if entry < 0 or self._read.get(entry) != int(self._serial[page]):
            return None
        return self.granule(page)[: int(self.directory.table.entries["n_bytes"][entry])]

    def _sum(self, page: int) -> int:
        return int(self.directory.table.checksums[self._entry[page], self._row[page]])

    def _note(self, pages: Pages, stored: Stored) -> None:
        self._entry[pages], self._serial[pages] = stored.entry, stored.serial
        self._row[pages] = np.arange(len(pages))

    def _noted(self, pages: Sequence[int]) -> list[tuple[int, int]]:
        """The entries, with their serials, that these pages stand for."""
        return sorted({(int(self._entry[page]), int(self._serial[page])) for page in pages if self._entry[page] >= 0})

    def _is_ours(self, unit: Unit) -> bool:
        """Of this model and rank, and of a shape that its layout gives it."""
        label, block = unit.label, self._layout.block_tokens
        if unit.model != self._model:
            return False
        if label.group == self._states:
            return unit.n_pages == self._layout.state_pages and unit.n_bytes == self._layout.state_bytes
        for group in self._layout.paged:
            if group.name == label.group:
                rows = len(label.keys) * block
                fits = 0 < rows <= group.page_tokens and label.start_tokens % group.page_tokens == 0
                return fits and unit.n_pages == len(group.layers) and unit.n_bytes == rows * group.row_bytes
        return False

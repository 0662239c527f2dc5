"""What the workers of a node share below their devices: who stored which unit where, who reads it, and what goes first.

Every call is one critical section over the arrays of `shared_table.py`. Who dies in one leaves it marked; the next to
come in rebuilds from the entries what can be rebuilt, and ends what the dead had begun. A worker that cannot come in
does without: it stores nothing, and restores nothing.

    put -> Place  --bytes copied--> publish     others see it from then on
        -> Stored                               it is there already
        -> Leaving --bytes copied elsewhere--> put again
    pin --bytes copied--> unpin
    changes                                     what came and what went since the last call
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from forebay.kvstore.arena import ArenaError
from forebay.kvstore.shared_entries import Entries, Place, Stored, Unit
from forebay.kvstore.shared_file import SharedFile, alive
from forebay.kvstore.shared_table import (
    FREE,
    READY,
    WRITING,
    Alive,
    Ints,
    Table,
    check,
    dead_workers,
    of_class,
    rebuilt,
    unfinished,
    victims,
)

SPARE_SHARE = 64
"""Ranking all entries takes as long as a copy: an eviction frees this part of the arena beyond what was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """They make room, and are this worker's to read until it puts again."""

    units: tuple[Stored, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """`entries` changed; `arrived` are those that can be read now. `upto` is where to go on from."""

    upto: int
    entries: Ints
    arrived: tuple[Stored, ...]


class Directory:
    """This worker's access. `pid` and `started` stand for its process, and `is_alive` tells of others'. `quotas`: how
    many granules of each class may be found or written, of the classes that have a quota."""

    def __init__(
        self,
        file: SharedFile,
        pid: int,
        started: int,
        is_alive: Alive = alive,
        quotas: Mapping[str, int] | None = None,
    ) -> None:
        """The file is locked. Raises ArenaError where too many workers use it."""
        self.table: Table = file.table
        self.entries = Entries(file.table)
        self._file = file
        self._is_alive = is_alive
        self._quotas = dict(quotas or {})
        self._to_free: list[int] = []
        self._to_unpin: list[int] = []
        with self._inside():
            self._slot = self._join(pid, started)
        self._bit = np.uint64(1 << self._slot)

    def put(self, unit: Unit, *, spill: bool, left: Sequence[int] = ()) -> "Place | Stored | Leaving | None":
        """Where to store it. None: nowhere, since what is there is worth more, or someone stores it right now.

        `spill`: what has to go is to be read before it does; its entries are then given back as `left`.
        """
        self._to_free += left
        with self._critical() as entered:
            if not entered:
                return None
            known = self.entries.known(unit)
            if known is not None:
                if self.table.state[known] != READY:
                    return None
                self.entries.use(known, unit.worth, unit.expires_at)
                return self.entries.stored(known)
            for room in (self._class_room, self._room):
                chosen = room(unit)
                if chosen is None:
                    return None
                if chosen and spill:
                    return Leaving(units=tuple(self.entries.leave(entry, self._slot) for entry in chosen))
                self.entries.free(chosen)
            return self.entries.place(unit, self._slot)

    def publish(self, place: Place, checksums: Sequence[int]) -> Stored | None:
        """All bytes are there. None where it is this worker's no longer."""
        with self._critical() as entered:
            entry, table = place.entry, self.table
            if not entered:
                self._to_free.append(entry)
                return None
            if table.state[entry] != WRITING or table.owner[entry] != self._slot:
                return None
            table.checksums[entry, : len(checksums)] = checksums
            table.serial[entry] = self.entries.change()
            self.entries.free_covered(entry)
            table.state[entry] = READY
            return self.entries.stored(entry)

    def give_up(self, entries: Sequence[int]) -> None:
        """They will not be published, or need not be read before they go."""
        self._to_free += entries
        with self._critical():
            pass

    def pin(self, entries: Ints, serials: npt.NDArray[np.uint64], expires_at: float = inf) -> npt.NDArray[np.bool_]:
        """Those that are there stay until `unpin`, and were used now: they are kept until `expires_at` at least. Which
        ones they are."""
        with self._critical() as entered:
            if not entered:
                return np.zeros(len(entries), dtype=bool)
            there: npt.NDArray[np.bool_] = (self.table.state[entries] == READY) & (
                self.table.serial[entries] == serials
            )
            self.table.readers[entries[there]] |= self._bit
            for entry in entries[there].tolist():
                self.entries.use(entry, float(self.table.entries["worth"][entry]), expires_at)
            return there

    def unpin(self, entries: Ints) -> None:
        self._to_unpin += entries.tolist()
        with self._critical():
            pass

    def discard(self, entry: int, serial: int) -> None:
        """Its bytes are wrong, or of no use without others."""
        with self._critical() as entered:
            if entered and self.table.state[entry] == READY and self.table.serial[entry] == serial:
                self.entries.doom(entry)

    def expire(self, now: float) -> None:
        """What nobody used until its time came is found by nobody any more."""
        if not len(self._expired(now)):
            return
        with self._critical() as entered:
            for entry in self._expired(now).tolist() if entered else ():
                self.entries.doom(entry)

    def purge(self, session: bytes | None, tenant: bytes | None) -> None:
        """What is of this session alone, or of this tenant, is found by nobody any more."""
        with self._critical() as entered:
            for entry in np.flatnonzero(self.table.state == READY).tolist() if entered else ():
                if self.entries.stored(entry).unit.label.origin.belongs_to(session, tenant):
                    self.entries.doom(entry)

    def share(self, entries: Sequence[tuple[int, int]]) -> None:
        """Several sessions use these, by (entry, serial)."""
        with self._critical() as entered:
            for entry, serial in entries if entered else ():
                if self.table.serial[entry] == serial:
                    self.entries.share(entry)

    def count_request(self) -> None:
        """Entries age by the requests of all workers."""
        with self._critical() as entered:
            if entered:
                self.table.set("tick", self.table.get("tick") + 1)

    def changes(self, since: int) -> Changes | None:
        """None where nothing changed, or it cannot be told now."""
        if self.table.get("changes") == since:
            return None
        with self._critical() as entered:
            if not entered:
                return None
            entries = np.flatnonzero(self.table.serial > np.uint64(since))
            ready = entries[self.table.state[entries] == READY].tolist()
            return Changes(
                upto=self.table.get("changes"),
                entries=entries,
                arrived=tuple(self.entries.stored(entry) for entry in ready),
            )

    def counts(self) -> tuple[int, int, int]:
        """Granules free, in use by a worker, and cached: told by the first living worker, (0, 0, 0) by the others, so
        that they add up."""
        dead = dead_workers(self.table, self._is_alive)
        users = [slot for slot, (pid, _) in enumerate(self.table.workers.tolist()) if pid and slot not in dead]
        if self._slot != users[0]:
            return 0, 0, 0
        held, table = self.table.entries["n_pages"], self.table
        cached = int(held[(table.state == READY) & (table.readers == 0)].sum())
        used = int(held[table.state != FREE].sum()) - cached
        return table.geometry.n_pages - used - cached, used, cached

    def close(self) -> None:
        """Leave. The last that lives removes the file."""
        with self._critical() as entered:
            if entered:
                self._end([self._slot, *dead_workers(self.table, self._is_alive)])
                if not self.table.workers["pid"].any():
                    self._file.remove()
        self._file.close()

    def check(self) -> None:
        """Assert that all adds up. For tests."""
        with self._critical():
            pass
        check(self.table)

    @contextmanager
    def _critical(self) -> Iterator[bool]:
        """False where the lock is not to be had. Whatever is raised inside leaves the mark, as a death does."""
        if not self._file.lock():
            yield False
            return
        with self._inside():
            self._give_back()
            yield True

    @contextmanager
    def _inside(self) -> Iterator[None]:
        try:
            if self.table.get("dirty"):
                self._rebuild()
            self.table.set("dirty", 1)
            yield
            self.table.set("dirty", 0)
        finally:
            self._file.unlock()

    def _give_back(self) -> None:
        """What is this worker's no longer: also what it could not give back when the lock was not to be had."""
        if self._to_unpin:
            self.table.readers[self._to_unpin] &= ~self._bit
            self._to_unpin.clear()
            self.entries.free_doomed()
        if self._to_free:
            own = set(unfinished(self.table, [self._slot]))
            self.entries.free([entry for entry in self._to_free if entry in own])
            self._to_free.clear()

    def _join(self, pid: int, started: int) -> int:
        self._end(dead_workers(self.table, self._is_alive))
        free = np.flatnonzero(self.table.workers["pid"] == 0)
        if not len(free):
            self.table.set("dirty", 0)
            raise ArenaError(f"{self._file.path}: {len(self.table.workers)} workers use it already")
        slot = int(free[0])
        self.table.workers["started"][slot] = started
        self.table.workers["pid"][slot] = pid
        return slot

    def _end(self, slots: list[int]) -> None:
        """These workers are gone: their pins, and what they did not finish."""
        if slots:
            self.entries.free(unfinished(self.table, slots))
            self.table.readers &= ~np.uint64(sum(1 << slot for slot in slots))
            self.entries.free_doomed()
            self.table.workers["pid"][slots] = 0

    def _rebuild(self) -> None:
        """Someone died in the critical section: the entries are the truth, all else is made from them."""
        table = self.table
        broken, free = rebuilt(table)
        for entry in broken:
            table.serial[entry] = self.entries.change()
            table.state[entry] = FREE
        table.free[: len(free)] = free
        table.set("n_free", len(free))
        table.set("rebuilt", table.get("rebuilt") + 1)
        self._end(dead_workers(table, self._is_alive))

    def _expired(self, now: float) -> Ints:
        return np.flatnonzero((self.table.state == READY) & (self.table.entries["expires_at"] <= now))

    def _class_room(self, unit: Unit) -> list[int] | None:
        """What its class has to give up for it, or None where it is to stay outside."""
        class_name, table = unit.label.origin.class_name, self.table
        if class_name not in self._quotas:
            return []
        own, quota = of_class(table, class_name), self._quotas[class_name]
        excess = int(table.entries["n_pages"][own].sum()) + unit.n_pages - quota
        if excess <= 0:
            return []
        self._end(dead_workers(table, self._is_alive))
        return victims(table, excess, quota // SPARE_SHARE, unit.worth, among=own)

    def _room(self, unit: Unit) -> list[int] | None:
        """What has to go for it, or None where it is to stay outside."""
        table = self.table
        fits = unit.n_pages <= table.geometry.unit_pages and len(unit.label.keys) <= table.geometry.run_keys
        if not fits:
            return None
        if not self._missing(unit):
            return []
        self._end(dead_workers(table, self._is_alive))
        missing = self._missing(unit)
        return victims(table, missing, table.geometry.n_pages // SPARE_SHARE, unit.worth) if missing else []

    def _missing(self, unit: Unit) -> int:
        """How many pages have to go for it. One at least where all entries are taken, as when all hold the fewest."""
        pages = max(0, unit.n_pages - self.table.get("n_free"))
        return pages or int(not (self.table.state == FREE).any())

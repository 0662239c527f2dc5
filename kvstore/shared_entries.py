"""What the critical section does to the entries of the arena: find, place, renew, give up. One call, one step.

The caller holds the lock. A step that a death cuts short leaves what `Directory` makes anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from forebay.kvstore.moves import MARK_BYTES, Label, Origin
from forebay.kvstore.shared_table import DOOMED, FREE, LEAVING, READY, WRITING, Ints, Table, tag


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One to be stored: `n_bytes` of each of its pages. `worth` (policy.worth) as it is used now. It goes at
    `expires_at`, in seconds of the node's clock, unless it is used before.

    `rows` build on those before them, states do not.
    """

    model: bytes
    label: Label
    rows: bool
    n_pages: int
    n_bytes: int
    worth: float
    uses: int
    expires_at: float = inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """An entry as it was: another `serial` means that another unit lies there, or none."""

    entry: int
    serial: int
    unit: Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Granules to copy a unit's pages into, in its order."""

    entry: int
    granules: Ints


class Entries:
    def __init__(self, table: Table) -> None:
        self.table = table

    def known(self, unit: Unit) -> int | None:
        """The entry that holds all of it, published or on its way; the one that ends with it, if there are two."""
        table, label = self.table, unit.label
        standing = (table.state == READY) | (table.state == WRITING)
        first = table.entries["first_tag"] == np.uint64(tag(unit.model, label.group, label.keys[0]))
        known = None
        for entry in np.flatnonzero(standing & first).tolist():
            row, keys = table.entries[entry], table.keys_of(entry)
            same = row["model"].tobytes() == unit.model and row["group"].decode() == label.group
            if same and label.keys[-1] == keys[-1]:
                return int(entry)
            if same and label.keys[-1] in keys:
                known = int(entry)
        return known

    def place(self, unit: Unit, owner: int) -> Place:
        table, label = self.table, unit.label
        entry = int(np.flatnonzero(table.state == FREE)[0])
        left = table.get("n_free") - unit.n_pages
        granules = table.free[left : left + unit.n_pages].astype(np.int64)
        table.set("n_free", left)
        table.pages[entry, : unit.n_pages] = granules
        table.keys[entry, : len(label.keys)] = np.frombuffer(b"".join(label.keys), np.uint8).reshape(
            len(label.keys), -1
        )
        row = table.entries[entry : entry + 1]
        row["n_pages"], row["n_keys"], row["n_bytes"] = unit.n_pages, len(label.keys), unit.n_bytes
        row["first_tag"] = tag(unit.model, label.group, label.keys[0])
        row["last_tag"] = tag(unit.model, label.group, label.keys[-1])
        row["has_before"], row["rows"], row["before_tag"] = label.before is not None, unit.rows, 0
        if label.before is not None:
            row["before"] = np.void(label.before)
            row["before_tag"] = tag(unit.model, label.group, label.before) if unit.rows else 0
        row["start_tokens"], row["end_tokens"] = label.start_tokens, label.end_tokens
        row["group"], row["model"] = label.group.encode(), np.void(unit.model)
        row["worth"], row["uses"], row["tick"] = unit.worth, unit.uses, table.get("tick")
        row["expires_at"], row["class"] = unit.expires_at, label.origin.class_name.encode()
        row["session"] = np.void(label.origin.session or bytes(MARK_BYTES))
        row["tenant"] = np.void(label.origin.tenant or bytes(MARK_BYTES))
        row["owner"], row["readers"] = owner, 0
        row["state"] = WRITING
        return Place(entry=entry, granules=granules)

    def leave(self, entry: int, owner: int) -> Stored:
        stored = self.stored(entry)
        self.table.serial[entry] = self.change()
        self.table.owner[entry] = owner
        self.table.state[entry] = LEAVING
        return stored

    def use(self, entry: int, worth: float, expires_at: float) -> None:
        row = self.table.entries[entry : entry + 1]
        row["tick"], row["worth"] = self.table.get("tick"), worth
        row["expires_at"] = np.maximum(row["expires_at"], expires_at)
        row["uses"] += 1

    def share(self, entry: int) -> None:
        self.table.entries["session"][entry] = np.void(bytes(MARK_BYTES))

    def doom(self, entry: int) -> None:
        """Nobody finds it from now on; it goes with its last reader."""
        self.table.serial[entry] = self.change()
        self.table.state[entry] = DOOMED
        self.free_doomed()

    def free_covered(self, newer: int) -> None:
        """Shorter runs of the same page, for which it stands from now on."""
        table, keys, until = self.table, self.table.keys_of(newer), self.table.entries["expires_at"]
        alike = table.entries["first_tag"] == table.entries["first_tag"][newer]
        for entry in np.flatnonzero(alike & (table.state == READY)).tolist():
            if entry != newer and table.keys_of(entry)[-1] in keys:
                until[newer] = max(until[newer], until[entry])
                self.doom(entry)

    def free_doomed(self) -> None:
        gone = (self.table.state == DOOMED) & (self.table.readers == 0)
        self.free(np.flatnonzero(gone).tolist())

    def free(self, entries: Sequence[int]) -> None:
        table = self.table
        for entry in entries:
            pages = table.pages_of(entry)
            table.serial[entry] = self.change()
            table.state[entry] = FREE
            n_free = table.get("n_free")
            table.free[n_free : n_free + len(pages)] = pages
            table.set("n_free", n_free + len(pages))

    def stored(self, entry: int) -> Stored:
        row = self.table.entries[entry]
        label = Label(
            group=row["group"].decode(),
            keys=self.table.keys_of(entry),
            before=row["before"].tobytes() if row["has_before"] else None,
            start_tokens=int(row["start_tokens"]),
            end_tokens=int(row["end_tokens"]),
            origin=Origin(
                class_name=row["class"].decode(errors="replace"),
                session=_mark(row["session"].tobytes()),
                tenant=_mark(row["tenant"].tobytes()),
            ),
        )
        unit = Unit(
            model=row["model"].tobytes(),
            label=label,
            rows=bool(row["rows"]),
            n_pages=int(row["n_pages"]),
            n_bytes=int(row["n_bytes"]),
            worth=float(row["worth"]),
            uses=int(row["uses"]),
            expires_at=float(row["expires_at"]),
        )
        return Stored(entry=entry, serial=int(row["serial"]), unit=unit)

    def change(self) -> int:
        number = self.table.get("changes") + 1
        self.table.set("changes", number)
        return number


def _mark(image: bytes) -> bytes:
    return image if any(image) else b""

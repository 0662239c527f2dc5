"""The directory of a host tier that several processes share, as arrays over one buffer, and what is decided from them.

    header | workers | entries | pages of entries | checksums | keys of entries | free pages | granules

An entry is one unit: which granules hold its pages, and all that its label says, so that any worker can enter it in
its own index. Every non-free entry's granules and the free stack make up all granules. Decisions are pure functions;
`directory.py` carries them out inside its critical section.

What must survive a death in the middle is written so that a reader of the entries alone knows what counts: an entry's
`state` is the last field written when it comes to be and the first when it goes.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from forebay.kvstore.chain import KEY_BYTES
from forebay.kvstore.config import CLASS_BYTES_MAX
from forebay.kvstore.layout import Layout
from forebay.kvstore.moves import MARK_BYTES

MAGIC = b"forebay"
VERSION = 3
WORKERS = 64
ALIGN_BYTES = 4096
FREE, WRITING, READY, LEAVING, DOOMED = range(5)
"""WRITING: its owner copies it in. LEAVING: its owner made room, and copies it elsewhere before it goes. DOOMED: it
goes with its last reader."""

HEADER = np.dtype(
    [("magic", "S8"), ("version", "<u4"), ("made", "<u4")]
    + [(name, "<u8") for name in ("page_bytes", "n_pages", "n_entries", "unit_pages", "run_keys")]
    + [(name, "<u8") for name in ("dirty", "n_free", "changes", "tick", "rebuilt")]
)
WORKER = np.dtype([("pid", "<i8"), ("started", "<i8")])
ENTRY = np.dtype(
    [("state", "u1"), ("owner", "u1"), ("has_before", "u1"), ("rows", "u1"), ("n_keys", "<u2"), ("n_pages", "<u2")]
    + [(name, "<u8") for name in ("serial", "readers", "first_tag", "last_tag", "before_tag")]
    + [(name, "<u8") for name in ("n_bytes", "start_tokens", "end_tokens", "tick", "uses")]
    + [("worth", "<f8"), ("expires_at", "<f8"), ("group", "S32"), ("model", "V32"), ("before", f"V{KEY_BYTES}")]
    + [("class", f"S{CLASS_BYTES_MAX}"), ("session", f"V{MARK_BYTES}"), ("tenant", f"V{MARK_BYTES}")],
    align=True,
)

Ints = npt.NDArray[np.int64]
Alive = Callable[[int, int], bool]
"""Of a process id and its start time: does it live?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes that all users of one table agree on. `unit_pages`, `run_keys`: the most that one unit has of each."""

    page_bytes: int
    n_pages: int
    n_entries: int
    unit_pages: int
    run_keys: int


def geometry_of(layout: Layout, host_bytes: int) -> Geometry:
    units = [len(group.layers) for group in layout.paged] + [layout.state_pages] * bool(layout.states)
    runs = [group.page_tokens // layout.block_tokens for group in layout.paged]
    n_pages = host_bytes // layout.page_bytes
    return Geometry(
        page_bytes=layout.page_bytes,
        n_pages=n_pages,
        n_entries=max(1, n_pages // min(units)),
        unit_pages=max(units),
        run_keys=max(runs, default=1),
    )


class Table:
    """The arrays. `free[:n_free]` is the stack of free granules; `pages[e, :n_pages]` an entry's, in its unit's order.

    `granules` uint8 [n_pages, page_bytes].
    """

    def __init__(self, geometry: Geometry, buffer: npt.NDArray[np.uint8]) -> None:
        self.geometry = geometry
        parts = _parts(geometry, buffer)
        self.header, self.workers = parts["header"].view(HEADER), parts["workers"].view(WORKER)
        entries = parts["entries"].view(ENTRY)
        self.entries = entries
        n, unit_pages = geometry.n_entries, geometry.unit_pages
        self.pages = parts["pages"].view(np.int32).reshape(n, unit_pages)
        self.checksums = parts["checksums"].view(np.uint64).reshape(n, unit_pages)
        self.keys = parts["keys"].reshape(n, geometry.run_keys, KEY_BYTES)
        self.free = parts["free"].view(np.int32)
        self.granules = parts["granules"].reshape(geometry.n_pages, geometry.page_bytes)
        self.state, self.owner, self.readers = entries["state"], entries["owner"], entries["readers"]
        self.serial, self.tick = entries["serial"], entries["tick"]

    def get(self, name: str) -> int:
        """A number of the header."""
        return int(self.header[name][0])

    def set(self, name: str, value: int) -> None:
        self.header[name][0] = value

    def keys_of(self, entry: int) -> tuple[bytes, ...]:
        return tuple(key.tobytes() for key in self.keys[entry, : int(self.entries["n_keys"][entry])])

    def pages_of(self, entry: int) -> npt.NDArray[np.int32]:
        return self.pages[entry, : int(self.entries["n_pages"][entry])]


def table_bytes(geometry: Geometry) -> int:
    return sum(map(_aligned, _lengths(geometry).values()))


def tag(model: bytes, group: str, key: bytes) -> int:
    """What entries are searched by; never 0, which stands for no key. Who finds one compares the keys themselves."""
    return xxhash.xxh3_64_intdigest(b"\0".join((model, group.encode(), key))) or 1


def of_class(table: Table, class_name: str) -> npt.NDArray[np.bool_]:
    """Which entries are charged to a class, and can be found or will be."""
    standing = (table.state == WRITING) | (table.state == READY)
    of: npt.NDArray[np.bool_] = standing & (table.entries["class"] == class_name.encode())
    return of


def victims(
    table: Table, n_pages: int, spare_pages: int, below: float, among: npt.NDArray[np.bool_] | None = None
) -> list[int] | None:
    """Entries (`among` these) that nobody reads and that are worth less than `below`, least first, until they hold
    `n_pages`, and up to `spare_pages` beyond. None where they hold fewer than `n_pages`.

    Rows that others build on stay as long as those do. An entry's worth falls as 1 / (1 + requests since its last use).
    """
    entries = table.entries
    parents = _parents(table)
    children = np.bincount(parents[parents >= 0], minlength=len(entries)).tolist()
    age = table.get("tick") - entries["tick"].astype(np.float64)
    worth = (entries["worth"] / (1 + np.maximum(age, 0))).tolist()
    evictable = (table.state == READY) & (table.readers == 0) & (True if among is None else among)
    held, tick, start = entries["n_pages"].tolist(), entries["tick"].tolist(), entries["start_tokens"].tolist()

    def ranked(entry: int) -> tuple[float, int, int, int]:
        return worth[entry], tick[entry], -start[entry], entry

    leaves = [ranked(entry) for entry in np.flatnonzero(evictable).tolist() if not children[entry]]
    heapq.heapify(leaves)
    chosen: list[int] = []
    while leaves and n_pages + spare_pages > 0:
        value, *_, entry = heapq.heappop(leaves)
        if value >= below:
            break
        chosen.append(entry)
        n_pages -= held[entry]
        parent = int(parents[entry])
        if parent >= 0:
            children[parent] -= 1
            if not children[parent] and evictable[parent]:
                heapq.heappush(leaves, ranked(parent))
    return chosen if n_pages <= 0 else None


def dead_workers(table: Table, alive: Alive) -> list[int]:
    """Slots whose processes are gone."""
    workers = enumerate(table.workers.tolist())
    return [slot for slot, (pid, started) in workers if pid and not alive(pid, started)]


def unfinished(table: Table, slots: list[int]) -> list[int]:
    """What these workers were writing, or moving elsewhere."""
    halfway = (table.state == WRITING) | (table.state == LEAVING)
    return [int(entry) for entry in np.flatnonzero(halfway & np.isin(table.owner, slots))]


def rebuilt(table: Table) -> tuple[list[int], npt.NDArray[np.int32]]:
    """From the entries alone: those that cannot be true, and the granules that belong to none of the others."""
    taken = np.zeros(table.geometry.n_pages, dtype=bool)
    broken: list[int] = []
    for entry in np.flatnonzero(table.state != FREE).tolist():
        pages = table.pages_of(entry)
        inside = len(pages) > 0 and bool(((pages >= 0) & (pages < len(taken))).all())
        if inside and len(np.unique(pages)) == len(pages) and not taken[pages].any():
            taken[pages] = True
        else:
            broken.append(entry)
    return broken, np.flatnonzero(~taken).astype(np.int32)


def check(table: Table) -> None:
    """Assert that every granule is free or of one entry, and that entries are found by what they hold."""
    n_free = table.get("n_free")
    live = np.flatnonzero(table.state != FREE).tolist()
    pages = [*table.free[:n_free].tolist(), *(page for entry in live for page in table.pages_of(entry).tolist())]
    assert sorted(pages) == list(range(table.geometry.n_pages)), "every granule has one place"
    assert not table.get("dirty"), "nobody is in the critical section"
    found: set[int] = set()
    for entry in live:
        row, keys = table.entries[entry], table.keys_of(entry)
        model, group = row["model"].tobytes(), row["group"].decode()
        assert int(row["first_tag"]) == tag(model, group, keys[0])
        assert int(row["last_tag"]) == tag(model, group, keys[-1])
        assert int(row["serial"]) <= table.get("changes")
        assert row["state"] != READY or not row["n_bytes"] > table.geometry.page_bytes
        if row["state"] in (WRITING, READY):
            assert int(row["last_tag"]) not in found, "nothing is stored twice"
            found.add(int(row["last_tag"]))
    users = sum(1 << slot for slot, (pid, _) in enumerate(table.workers.tolist()) if pid)
    assert not int(np.bitwise_or.reduce(table.readers)) & ~users, "only workers read"


def _parents(table: Table) -> Ints:
    """For each entry that stands, the entry that holds the rows before its own; -1 where there is none."""
    parents = np.full(len(table.entries), -1, dtype=np.int64)
    standing = np.flatnonzero((table.state == WRITING) | (table.state == READY))
    if len(standing):
        last, before = table.entries["last_tag"][standing], table.entries["before_tag"][standing]
        order = np.argsort(last)
        at = np.minimum(np.searchsorted(last[order], before), len(order) - 1)
        is_there = (last[order][at] == before) & (before != 0)
        parents[standing[is_there]] = standing[order[at[is_there]]]
    return parents


def _lengths(geometry: Geometry) -> dict[str, int]:
    """Bytes of each part."""
    n = geometry.n_entries
    return {
        "header": HEADER.itemsize,
        "workers": WORKERS * WORKER.itemsize,
        "entries": n * ENTRY.itemsize,
        "pages": 4 * n * geometry.unit_pages,
        "checksums": 8 * n * geometry.unit_pages,
        "keys": n * geometry.run_keys * KEY_BYTES,
        "free": 4 * geometry.n_pages,
        "granules": geometry.n_pages * geometry.page_bytes,
    }


def _parts(geometry: Geometry, buffer: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[np.uint8]]:
    """Each part begins on a memory page."""
    parts, start = {}, 0
    for name, length in _lengths(geometry).items():
        parts[name] = buffer[start : start + length]
        start += _aligned(length)
    return parts


def _aligned(length: int) -> int:
    return -(-length // ALIGN_BYTES) * ALIGN_BYTES

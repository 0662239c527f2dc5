"""What one tier holds: spans of blocks, checkpoints, and where a block key or a checkpoint is found.

A unit owns pages and is in one of these places:

    pinned                      pages count as leased; matchable only if `entered`
    not pinned, entered         pages count as cached; matchable, may be evicted
    neither                     does not exist: its pages went back in the same call

A span holds the blocks of one page position of one group, from the page's first block on, without holes. So the key
under which its last block is found vouches for the whole run, and a span whose last block also lies in another span
is redundant: it is freed as soon as nobody pins it.
"""

from collections import Counter
from dataclasses import dataclass, field
from math import inf
from typing import TypeVar

from forebay.kvstore.layout import Layout
from forebay.kvstore.moves import NOBODY, Origin, Pages, Tier
from forebay.kvstore.pool import PagePool


@dataclass(slots=True, kw_only=True, eq=False)
class Unit:
    """Pages that live and die together. As it is: one request's running state, which never matches."""

    pages: Pages
    pins: int = 1
    tick: int = 0
    uses: int = 1
    """Requests that had use of it, the one that computed it included."""

    entered: bool = False
    lost: bool = False
    """Its bytes will not be there: it never matches."""

    origin: Origin = NOBODY
    expires_at: float = inf
    """In seconds of the turns' clock: it goes then, unless it is used before."""


@dataclass(slots=True, kw_only=True, eq=False)
class Span(Unit):
    """`pages` int32 [layers]. `keys`: the blocks that match. `parent`: key of the block before the page's first."""

    group: str
    first_block: int
    parent: bytes | None
    keys: list[bytes] = field(default_factory=list)


@dataclass(slots=True, kw_only=True, eq=False)
class Checkpoint(Unit):
    """A state at a block's end. `pages` int32 [layout.state_pages]: all KDA groups in layout order, so all or none."""

    key: bytes
    tokens: int
    previous: bytes | None
    previous_tokens: int
    """Key and place of the nearest one before it on its chain when it was kept, or of that one's own when it is lost
    (None, 0: none). What a checkpoint saves is the prefill from there on."""


AnyUnit = TypeVar("AnyUnit", bound=Unit)


class TierIndex:
    """One tier's pages and units. Mutating calls keep `check()` true.

    `held_pages`: of all units, by the class that is charged with them; `cached_pages`: of those that nobody pins.
    """

    def __init__(self, tier: Tier, layout: Layout, n_pages: int) -> None:
        self.tier = tier
        self.pool = PagePool(n_pages)
        self.held_pages: Counter[str] = Counter()
        self.cached_pages: Counter[str] = Counter()
        self.units: dict[Unit, None] = {}
        self.spans: dict[str, dict[bytes, list[Span]]] = {group.name: {} for group in layout.paged}
        self.checkpoints: dict[bytes, Checkpoint] = {}
        self._state_pages = layout.state_pages

    def span(self, group: str, key: bytes) -> Span | None:
        """A span that holds this block and all of its page before it."""
        found = self.spans[group].get(key)
        return found[-1] if found else None

    def add(self, unit: AnyUnit) -> AnyUnit:
        """Take charge of a unit on freshly taken pages; the caller holds its one pin."""
        assert unit.pins == 1
        assert not unit.entered
        self.units[unit] = None
        self.held_pages[unit.origin.class_name] += len(unit.pages)
        return unit

    def charge(self, unit: Unit, origin: Origin) -> None:
        """A pinned unit is of this origin from now on."""
        assert unit.pins > 0
        self.held_pages[unit.origin.class_name] -= len(unit.pages)
        self.held_pages[origin.class_name] += len(unit.pages)
        unit.origin = origin

    def pin(self, unit: Unit) -> None:
        assert unit in self.units
        if unit.pins == 0:
            self.pool.lease(len(unit.pages))
            self.cached_pages[unit.origin.class_name] -= len(unit.pages)
        unit.pins += 1

    def unpin(self, unit: Unit) -> None:
        """Give a pin back. The unit ends here unless it can match and is the only one that holds its last block."""
        assert unit.pins > 0
        unit.pins -= 1
        if unit.pins:
            return
        if unit.entered and not self._redundant(unit):
            self.pool.cache(len(unit.pages))
            self.cached_pages[unit.origin.class_name] += len(unit.pages)
            return
        if unit.entered:
            self._withdraw(unit)
        self._free(unit, cached=False)

    def enter(self, unit: Span | Checkpoint, keys: list[bytes]) -> bool:
        """`enter_span` or `enter_checkpoint`, unless its bytes are lost."""
        if unit.lost:
            return False
        return self.enter_span(unit, keys) if isinstance(unit, Span) else self.enter_checkpoint(unit)

    def enter_span(self, span: Span, keys: list[bytes]) -> bool:
        """Make the run `keys` of a pinned span matchable, its bytes being there. False: it all lies elsewhere too."""
        assert span.pins > 0
        assert keys[: len(span.keys)] == span.keys, "a run only grows"
        where = self.spans[span.group]
        if where.get(keys[-1]):
            return False
        for key in keys[len(span.keys) :]:
            where.setdefault(key, []).append(span)
        span.keys = keys
        span.entered = True
        self._free_redundant(span)
        return True

    def enter_checkpoint(self, checkpoint: Checkpoint) -> bool:
        """Make a pinned checkpoint matchable, the bytes of all groups being there. False: its key already is."""
        assert checkpoint.pins > 0
        assert len(checkpoint.pages) == self._state_pages, "every KDA group or none"
        if checkpoint.key in self.checkpoints:
            return False
        self.checkpoints[checkpoint.key] = checkpoint
        checkpoint.entered = True
        return True

    def forget(self, unit: Unit) -> None:
        """End a unit's matching at once and for good; its pages go back now, or when its last pin does."""
        unit.lost = True
        if unit.entered:
            self._withdraw(unit)
        if unit.pins == 0:
            self._free(unit, cached=True)

    def evictable(self) -> list[Unit]:
        return [unit for unit in self.units if unit.pins == 0]

    def check(self) -> None:
        """Every law that one tier can see by itself."""
        self.pool.check()
        pages = [int(page) for unit in self.units for page in unit.pages]
        assert len(pages) == len(set(pages)), "a page has one owner"
        assert sum(len(unit.pages) for unit in self.units if unit.pins) == self.pool.leased
        assert sum(len(unit.pages) for unit in self.units if not unit.pins) == self.pool.cached
        assert +self.held_pages == _pages_by_class(list(self.units)), "every page is charged to one class"
        assert +self.cached_pages == _pages_by_class(self.evictable())
        assert all(unit.entered for unit in self.units if not unit.pins), "what nobody pins can match"
        assert not any(self._redundant(unit) for unit in self.units if not unit.pins)
        listed = [(key, span) for where in self.spans.values() for key, spans in where.items() for span in spans]
        assert all(span.entered and key in span.keys and span in self.units for key, span in listed)
        held = [unit for unit in self.units if isinstance(unit, Span)]
        assert len(listed) == sum(len(span.keys) for span in held), "a span is found under each of its keys"
        assert {unit for unit in self.units if isinstance(unit, Checkpoint) and unit.entered} == set(
            self.checkpoints.values()
        )

    def _redundant(self, unit: Unit) -> bool:
        return isinstance(unit, Span) and unit.entered and len(self.spans[unit.group][unit.keys[-1]]) > 1

    def _free_redundant(self, newer: Span) -> None:
        where = self.spans[newer.group]
        covered = {other for key in newer.keys for other in where[key] if other is not newer}
        for other in covered:
            if other.keys[-1] in newer.keys:
                newer.expires_at = max(newer.expires_at, other.expires_at)  # it stands for that one from now on
            if other.pins == 0 and self._redundant(other):
                self.forget(other)

    def _withdraw(self, unit: Unit) -> None:
        if isinstance(unit, Checkpoint):
            del self.checkpoints[unit.key]
        elif isinstance(unit, Span):
            where = self.spans[unit.group]
            for key in unit.keys:
                where[key].remove(unit)
                if not where[key]:
                    del where[key]
            unit.keys = []
        unit.entered = False

    def _free(self, unit: Unit, *, cached: bool) -> None:
        del self.units[unit]
        self.held_pages[unit.origin.class_name] -= len(unit.pages)
        self.cached_pages[unit.origin.class_name] -= len(unit.pages) * cached
        self.pool.give(unit.pages, cached=cached)


def keys_of(unit: Unit) -> list[bytes]:
    """The run of a span; empty for any other unit."""
    return list(unit.keys) if isinstance(unit, Span) else []


def _pages_by_class(units: list[Unit]) -> Counter[str]:
    pages: Counter[str] = Counter()
    for unit in units:
        pages[unit.origin.class_name] += len(unit.pages)
    return pages

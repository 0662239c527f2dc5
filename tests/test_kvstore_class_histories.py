"""Random histories of classes with quotas and times to live, against twins that know tokens, classes and the clock.

What a class keeps no longer is not hit and is in no tier; no tier holds more of a class than its quota, at any time.
"""

from collections import defaultdict
from math import inf

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import invariant, precondition, rule

from forebay.kvstore.config import ClassShare
from forebay.kvstore.index import Checkpoint, Span
from forebay.kvstore.shared_table import READY, WRITING
from forebay.kvstore.turn import Turn
from tests.kvstore_twin import BLOCK, one_block_layout
from tests.test_kvstore_histories import LAYOUT, Histories, Run, SsdHistories, TightHistories, blocks_of
from tests.test_kvstore_histories import met as met  # fixtures of that file
from tests.test_kvstore_histories import run as run

Ids = tuple[int, ...]
TTL_S = {"agent": 60.0, "batch": 10.0}
QUOTAS = {"agent": {"device": 14, "host": 20, "ssd": 24}, "batch": {"device": 6, "host": 8, "ssd": 10}}
"""In pages."""

PAGE = LAYOUT.page_bytes


class TtlHistories(Histories):
    """An unbounded pool of one-block pages: what is hit is known exactly. A use makes what it used stay for as long as
    its class keeps things, and never less long than before; and a session's purge ends what it alone has used."""

    layout = one_block_layout()
    classes = tuple(ClassShare(name=name, ttl_s=ttl_s) for name, ttl_s in TTL_S.items())

    def __init__(self) -> None:
        super().__init__()
        self.until: dict[tuple[str, Ids], float] = defaultdict(float)
        self.users: dict[tuple[str, Ids], set[str]] = defaultdict(set)

    @precondition(lambda self: self.fault_is_due(3))
    @rule(
        seconds=st.sampled_from([0.0, 1.0, 4.0, 9.0, 25.0]),
        class_name=st.sampled_from(["agent", "batch", "other"]),
        session=st.sampled_from(["s", "t", ""]),
    )
    def time_passes(self, seconds: float, class_name: str, session: str) -> None:
        """And the next requests are of this class and session."""
        self.now, self.class_name, self.session = self.now + seconds, class_name, session
        self.memory.advance(self.now)
        self.seen.event("time passed")

    @precondition(lambda self: self.fault_is_due(6))
    @rule(session=st.sampled_from(["s", "t"]))
    def purge(self, session: str) -> None:
        self.memory.purge(session=session)
        for each in [each for each, users in self.users.items() if users == {session}]:
            self.until[each] = 0.0
        self.seen.event("session purged")

    def use(self) -> Turn:
        return Turn(class_name=self.class_name, session=self.session, now=self.now)

    def note_hit(self, ids: Ids, upto: int, class_name: str) -> None:
        self.note_rows(ids, 0, upto, class_name, self.session)
        if upto:
            self.note_state(ids[:upto], class_name, self.session)

    def note_rows(self, ids: Ids, start: int, upto: int, class_name: str, session: str) -> None:
        super().note_rows(ids, start, upto, class_name, session)
        for prefix in blocks_of(ids, start, upto):
            self.note(("rows", prefix), class_name, session)

    def note_state(self, prefix: Ids, class_name: str, session: str) -> None:
        super().note_state(prefix, class_name, session)
        self.note(("state", prefix), class_name, session)

    def note(self, each: tuple[str, Ids], class_name: str, session: str) -> None:
        if self.until[each] <= self.now:  # it was not there: it is stored now
            self.users[each].clear()
        self.until[each] = max(self.until[each], self.now + TTL_S.get(class_name, inf))
        self.users[each].add(session)

    def matchable(self, prefix: Ids) -> bool:
        return self.until["rows", prefix] > self.now

    def restorable(self, prefix: Ids) -> bool:
        return self.until["state", prefix] > self.now


class TightClassHistories(TightHistories):
    """Small pools, quotas in each, times to live. Pages hold several blocks, and are used as wholes.

    `used_until`: of the blocks that share a page's first block, until when the longest use of any of them counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.classes = tuple(
            ClassShare(
                name=name,
                device_bytes=pages["device"] * PAGE,
                host_bytes=pages["host"] * PAGE,
                ssd_bytes=pages["ssd"] * PAGE if self.ssd_bytes else None,
                ttl_s=TTL_S[name],
            )
            for name, pages in QUOTAS.items()
        )
        self.used_until: dict[tuple[str, Ids], float] = defaultdict(float)
        self.users: dict[bytes, set[str]] = defaultdict(set)

    @precondition(lambda self: self.fault_is_due(3))
    @rule(seconds=st.sampled_from([0.0, 1.0, 4.0, 25.0]), class_name=st.sampled_from(["agent", "batch", "other"]))
    def time_passes(self, seconds: float, class_name: str) -> None:
        self.now, self.class_name = self.now + seconds, class_name
        self.memory.advance(self.now)
        self.seen.event("time passed")

    def use(self) -> Turn:
        return Turn(class_name=self.class_name, now=self.now)

    def note_hit(self, ids: Ids, upto: int, class_name: str) -> None:
        self.note_used(ids, upto, class_name)
        if upto:
            self.note_state(ids[:upto], class_name, self.session)

    def note_rows(self, ids: Ids, start: int, upto: int, class_name: str, session: str) -> None:
        super().note_rows(ids, start, upto, class_name, session)
        self.note_used(ids, upto, class_name)

    def note_used(self, ids: Ids, upto: int, class_name: str) -> None:
        for at in range(BLOCK, upto + 1, BLOCK):
            for group in self.layout.paged:
                self.renew(group.name, first_block(ids[:at], group.page_tokens), class_name)
        for key in self.memory.store.chain(ids[:upto]).keys:
            self.users[key].add(class_name)

    def note_state(self, prefix: Ids, class_name: str, session: str) -> None:
        super().note_state(prefix, class_name, session)
        self.renew("states", prefix, class_name)
        self.users[self.memory.store.chain(prefix).keys[-1]].add(class_name)

    def renew(self, group: str, at: Ids, class_name: str) -> None:
        until = self.now + TTL_S.get(class_name, inf)
        self.used_until[group, at] = max(self.used_until[group, at], until)

    def matchable(self, prefix: Ids) -> bool:
        found = super().matchable(prefix)
        for group in self.layout.paged if found else ():
            assert self.used_until[group.name, first_block(prefix, group.page_tokens)] > self.now, "old rows match"
        return found

    def restorable(self, prefix: Ids) -> bool:
        found = super().restorable(prefix)
        assert not found or self.used_until["states", prefix] > self.now, "an old checkpoint matches"
        return found

    @invariant()
    def class_quotas_hold(self) -> None:
        if not hasattr(self, "memory"):
            return
        for name, pages in QUOTAS.items():
            for tier in ("device", "ssd"):
                units = self.memory.store._tiers.of(tier).evictable()  # type: ignore[arg-type]
                assert sum(len(unit.pages) for unit in units if unit.origin.class_name == name) <= pages[tier]
            assert self.host_pages_of(name) <= pages["host"]

    @invariant()
    def who_is_charged_has_used_it(self) -> None:
        if not hasattr(self, "memory"):
            return
        for unit in self.memory.store._tiers.device.units:
            keys = unit.keys[-1:] if isinstance(unit, Span) else [unit.key] if isinstance(unit, Checkpoint) else []
            assert not unit.entered or unit.origin.class_name in self.users[keys[0]]

    def host_pages_of(self, name: str) -> int:
        """Of what can be found, or is about to be."""
        if self.memory.host is None:
            return 0
        table = self.memory.host.directory.table
        own = (table.entries["class"] == name.encode()) & ((table.state == READY) | (table.state == WRITING))
        return int(table.entries["n_pages"][own].sum())


class WriteThroughClassHistories(TightClassHistories):
    write = "write_through"


class SsdClassHistories(TightClassHistories, SsdHistories):
    """What lies on the SSD over a restart is as if used then."""

    ssd_write = "write_through"

    def make_again(self) -> None:
        super().make_again()
        for at in self.used_until:
            self.used_until[at] = inf  # of which class each is shows at the end of the time, in the tier's own test


def first_block(prefix: Ids, page_tokens: int) -> Ids:
    """Of the page that the prefix's last block lies in."""
    return prefix[: (len(prefix) - 1) // page_tokens * page_tokens + BLOCK]


MACHINES = (TtlHistories, TightClassHistories, WriteThroughClassHistories, SsdClassHistories)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("count", [50, pytest.param(250, marks=pytest.mark.soak)])
def test_no_class_keeps_more_or_for_longer_than_it_may(run: Run, machine: type[Histories], count: int) -> None:
    run(machine, count)

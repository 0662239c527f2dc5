"""Random histories of the store, with real bytes, against twins that know only tokens.

After every step: pages add up in every tier, every pin has its lease, and every live request still reads its own bytes.
`pytest -s`, or --soak, prints what the histories met: events, hits by tier, misses by reason, faults.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from forebay.kvstore.config import ClassShare, StoreConfig
from forebay.kvstore.index import TierIndex, Unit
from forebay.kvstore.memory import Memory, make_memory
from forebay.kvstore.store import Lease, Refusal
from forebay.kvstore.turn import Turn
from tests.history_counts import HistoryCounts
from tests.kvstore_twin import BLOCK, Owner, compute, tiny_layout, verify

LAYOUT = tiny_layout()
LEASES_MAX = 4
STEPS = 50
LEAST_EVENTS, MEDIAN_EVENTS = 20, 40
"""Shorter histories are thrown away, and more are made; the median has this many at least."""


@dataclass
class Request:
    ids: tuple[int, ...]
    lease: Lease
    at: int
    settled: bool
    n_prompt: int
    class_name: str
    session: str


class Histories(RuleBasedStateMachine):
    """`committed` and `kept` are the twin: every prefix whose rows, or whose state, was ever made matchable."""

    counts = HistoryCounts()
    layout = LAYOUT
    classes: tuple[ClassShare, ...] = ()
    device_pages = 10_000
    host_pages = 0
    write = "write_back"
    ssd_bytes = 0
    ssd_write = "write_back"
    loses = False

    def __init__(self) -> None:
        super().__init__()
        self.seen = HistoryCounts(events=[0])
        self.run_dir = tempfile.mkdtemp()
        self.config: StoreConfig
        self.memory: Memory
        self.prompts: list[tuple[int, ...]] = [()]
        self.requests: list[Request] = []
        self.committed: set[tuple[int, ...]] = set()
        self.kept: set[tuple[int, ...]] = set()
        self.now, self.class_name, self.session = 0.0, "", ""

    @initialize(policy=st.sampled_from(["prompt_end", "prompt_end+junction", "prompt_end+junction+interval:8"]))
    def start(self, policy: str) -> None:
        self.config = StoreConfig(
            device_bytes=self.device_pages * self.layout.page_bytes,
            host_bytes=self.host_pages * self.layout.page_bytes,
            run_dir=self.run_dir,
            checkpoints=policy,
            write=self.write,  # type: ignore[arg-type]
            ssd_path=str(Path(self.run_dir) / "ssd") if self.ssd_bytes else None,
            ssd_bytes=self.ssd_bytes,
            ssd_queue_bytes=1 << 20,
            ssd_write=self.ssd_write,  # type: ignore[arg-type]
            classes=self.classes,
        )
        self.memory = make_memory(self.layout, self.config, "twin")

    def teardown(self) -> None:
        for request in self.requests:
            request.lease.close()
        if hasattr(self, "memory"):
            self.memory.store.check()
            assert all(tier.leased_pages == 0 for tier in self.memory.store.stats().tiers)
            self.seen.end(self.memory.store.stats())
            self.memory.close()
        shutil.rmtree(self.run_dir)
        if sys.exc_info()[0] is None:  # neither failed nor given up on the way
            assume(self.seen.events[-1] >= LEAST_EVENTS)
            self.counts.add(self.seen)

    @precondition(lambda self: len(self.requests) < LEASES_MAX)
    @rule(
        which=st.integers(0, 1000),
        cut=st.integers(0, 60),
        tail=st.lists(st.integers(0, 1), min_size=1, max_size=30),
        extra=st.integers(0, 8),
        holder=st.sampled_from([Owner("a"), Owner("b")]),
        settled=st.booleans(),
    )
    def open(self, which: int, cut: int, tail: list[int], extra: int, holder: Owner, settled: bool) -> None:
        """A prompt that shares a prefix with an earlier one. Not `settled`: its moves happen later, or never."""
        ids = self.prompts[which % len(self.prompts)][:cut] + tuple(tail)
        self.prompts.append(ids)
        store = self.memory.store
        chain = store.chain(ids)
        self.memory.discover(chain)
        expected = self.expected_hit(ids)
        assert store.lookup(chain, len(ids)).tokens == expected
        before = store.stats()
        source = self.memory if settled else store
        turn = self.use()
        lease = source.open(holder, chain, n_prompt=len(ids), capacity_tokens=len(ids) + extra, turn=turn)
        self.note_hit(ids, expected, self.class_name)
        if isinstance(lease, Refusal):
            assert lease.kind == "too_large" or lease.needed_pages > lease.available_pages
            assert store.stats().tiers == before.tiers, "a refusal changes nothing"
            self.seen.event("refused")
            return
        assert lease.hit_tokens == expected or self.loses
        assert lease.hit_tokens <= expected
        assert lease.hit_tokens < len(ids)
        self.seen.event("opened")
        self.seen.hit(lease.hit)
        self.requests.append(Request(ids, lease, lease.hit_tokens, settled, len(ids), self.class_name, self.session))

    @rule(which=st.integers(0, 1000), tail=st.lists(st.integers(0, 1), min_size=1, max_size=16), again=st.booleans())
    def turn(self, which: int, tail: list[int], again: bool) -> None:
        """One whole request that extends an earlier prompt, or sends it `again`."""
        prompt = self.prompts[which % len(self.prompts)]
        ids = prompt if prompt and again else prompt[:60] + tuple(tail)
        self.prompts.append(ids)
        store = self.memory.store
        self.memory.discover(store.chain(ids))
        expected = self.expected_hit(ids)
        turn, n_prompt = self.use(), len(ids)
        lease = self.memory.open(Owner("c"), store.chain(ids), n_prompt=n_prompt, capacity_tokens=n_prompt, turn=turn)
        self.note_hit(ids, expected, self.class_name)
        if isinstance(lease, Refusal):
            self.seen.event("refused")
            return
        self.seen.event("whole turn")
        self.seen.hit(lease.hit)
        assert lease.hit_tokens == expected or (self.loses and lease.hit_tokens < expected)
        with lease:
            verify(self.memory, lease, ids, lease.hit_tokens)
            at = lease.hit_tokens
            for end in (*lease.checkpoints, len(ids)):
                compute(self.memory, lease, ids, at, end)
                self.memory.commit(lease, end)
                self.note_rows(ids, at, end, self.class_name, self.session)
                if end in lease.checkpoints and self.memory.checkpoint(lease, end) is None:
                    self.note_state(ids[:end], self.class_name, self.session)
                at = end

    @precondition(lambda self: any(not request.settled for request in self.requests))
    @rule(which=st.integers(0, 1000))
    def settle(self, which: int) -> None:
        waiting = [request for request in self.requests if not request.settled]
        request = waiting[which % len(waiting)]
        self.seen.event("restored")
        wrong = self.memory.carry_out(request.lease.moves)
        restoring = self.memory.restore(request.lease.moves if wrong is None else [])
        for each in restoring:
            while not each.advance():
                each.wait(10)
            if each.wrong or each.gone:
                wrong = each.tier, each.wrong
                self.memory.lose(each.tier, each.gone)
        if wrong is not None:
            self.memory.drop_corrupt(*wrong)
            self.finish(request)
            self.memory.settle()
            return
        request.lease.ready()
        self.memory.settle()
        request.settled = True

    @precondition(lambda self: self.unfinished())
    @rule(which=st.integers(0, 1000), chunk=st.integers(1, 5), keep=st.booleans())
    def prefill(self, which: int, chunk: int, keep: bool) -> None:
        """Compute up to a block end or the prompt's end; keep the state where the policy wants it, or anywhere."""
        request = self.unfinished()[which % len(self.unfinished())]
        self.seen.event("prefilled")
        end = min(request.n_prompt, (request.at // BLOCK + chunk) * BLOCK)
        end = min([at for at in request.lease.checkpoints if at > request.at] + [end])
        compute(self.memory, request.lease, request.ids, request.at, end)
        self.memory.commit(request.lease, end)
        self.note_rows(request.ids, request.at, end, request.class_name, request.session)
        request.at = end
        if end % BLOCK == 0 and (keep or end in request.lease.checkpoints):
            refusal = self.memory.checkpoint(request.lease, end)
            if refusal is None:
                self.note_state(request.ids[:end], request.class_name, request.session)
            assert refusal is None or self.loses

    @precondition(lambda self: self.prefilled())
    @rule(which=st.integers(0, 1000), more=st.integers(1, 30))
    def decode(self, which: int, more: int) -> None:
        """Tokens past the prompt: never committed, in pages that grow."""
        request = self.prefilled()[which % len(self.prefilled())]
        if self.memory.grow(request.lease, request.at + more) is not None:
            self.seen.event("refused")
            return
        self.seen.event("decoded")
        request.ids += tuple(1 for _ in range(more))
        compute(self.memory, request.lease, request.ids, request.at, len(request.ids))
        request.at = len(request.ids)

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 1000))
    def close(self, which: int) -> None:
        """Also before its moves were carried out."""
        self.seen.event("closed")
        self.finish(self.requests[which % len(self.requests)])

    @precondition(lambda self: self.requests and self.fault_is_due(4))
    @rule(which=st.integers(0, 1000))
    def holder_dies(self, which: int) -> None:
        holder = self.requests[which % len(self.requests)].lease.holder
        mine = [request for request in self.requests if request.lease.holder == holder]
        assert self.memory.store.release_holder(holder) == len(mine)
        self.seen.event("holder died with leases", fault=True)
        self.requests = [request for request in self.requests if request not in mine]

    @precondition(lambda self: len(self.prompts) > 1)
    @rule(which=st.integers(0, 1000))
    def probe(self, which: int) -> None:
        """A look-up changes nothing."""
        ids = self.prompts[1 + which % (len(self.prompts) - 1)]
        before = self.memory.store.stats()
        self.seen.event("probed")
        assert self.memory.store.lookup(self.memory.store.chain(ids), len(ids)).tokens == self.expected_hit(ids)
        assert self.memory.store.stats() == before

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "memory"):
            return
        self.memory.store.check()
        for request in self.requests:
            if request.settled:
                verify(self.memory, request.lease, request.ids, request.at)

    def use(self) -> Turn | None:
        """Whose use the next request is."""
        return None

    def note_hit(self, ids: tuple[int, ...], upto: int, class_name: str) -> None:
        """A request of this class restores so much, or tries to."""

    def note_rows(self, ids: tuple[int, ...], start: int, upto: int, class_name: str, session: str) -> None:
        """All blocks that end after `start` and up to `upto` were made matchable, by a request of this class and
        session."""
        self.committed.update(blocks_of(ids, start, upto))

    def note_state(self, prefix: tuple[int, ...], class_name: str, session: str) -> None:
        self.kept.add(prefix)

    def fault_is_due(self, every: int) -> bool:
        """Faults come now and then: a history of nothing else would find nothing to harm."""
        return self.seen.events[-1] % every == every - 1

    def unfinished(self) -> list[Request]:
        return [request for request in self.requests if request.settled and request.at < request.n_prompt]

    def prefilled(self) -> list[Request]:
        return [request for request in self.requests if request.settled and request.at >= request.n_prompt]

    def finish(self, request: Request) -> None:
        request.lease.close()
        request.lease.close()
        self.requests.remove(request)

    def expected_hit(self, ids: tuple[int, ...]) -> int:
        """Brute force, from tokens: the longest kept boundary before the last token with all rows before it."""
        for end in range((len(ids) - 1) // BLOCK * BLOCK, 0, -BLOCK):
            blocks = [ids[:at] for at in range(BLOCK, end + 1, BLOCK)]
            if self.restorable(ids[:end]) and all(self.matchable(block) for block in blocks):
                return end
        return 0

    def matchable(self, prefix: tuple[int, ...]) -> bool:
        return prefix in self.committed

    def restorable(self, prefix: tuple[int, ...]) -> bool:
        return prefix in self.kept


class TightHistories(Histories):
    """Pools so small that everything is evicted, saved, restored and refused; bytes in the host tier go bad.

    What is matchable is read from the tiers, block by block, since evictions are the store's own choice. It must be a
    part of what was ever committed.
    """

    device_pages = 40
    host_pages = 60
    loses = True

    def matchable(self, prefix: tuple[int, ...]) -> bool:
        key = self.memory.store.chain(prefix).keys[-1]
        tiers = self.memory.store._tiers.order
        found = all(any(key in tier.spans[group.name] for tier in tiers) for group in self.layout.paged)
        assert not found or prefix in self.committed
        return found

    def restorable(self, prefix: tuple[int, ...]) -> bool:
        key = self.memory.store.chain(prefix).keys[-1]
        found = any(key in tier.checkpoints for tier in self.memory.store._tiers.order)
        assert not found or prefix in self.kept
        return found

    @precondition(lambda self: self.memory.store._tiers.host.pool.cached and self.fault_is_due(2))
    @rule(which=st.integers(0, 1000), at=st.integers(0, 95), bit=st.integers(0, 7))
    def flip(self, which: int, at: int, bit: int) -> None:
        """A bit of a cached host page: of its bytes, or of its padding."""
        host = self.memory.host
        assert host is not None
        units = self.memory.store._tiers.host.evictable()
        pages = sorted(page for unit in units for page in unit.pages.tolist())
        host.granule(pages[which % len(pages)])[at] ^= 1 << bit
        self.seen.event("bit of a host page flipped", fault=True)

    @precondition(lambda self: self.entered() and self.fault_is_due(4))
    @rule(which=st.integers(0, 1000))
    def lose_page(self, which: int) -> None:
        """A page of any tier, also one that is pinned, is found to be wrong: of one group of rows, or of one state."""
        tier, unit = self.entered()[which % len(self.entered())]
        self.seen.event(f"page of {tier.tier} found wrong", fault=True)
        self.memory.store.drop_corrupt(tier.tier, unit.pages[:1])
        assert not unit.entered

    def entered(self) -> list[tuple[TierIndex, Unit]]:
        return [(tier, unit) for tier in self.memory.store._tiers.order for unit in tier.units if unit.entered]

    @precondition(lambda self: any(len(ids) >= BLOCK for ids in self.prompts) and self.fault_is_due(4))
    @rule(which=st.integers(0, 1000), end=st.integers(1, 12))
    def lose_one_group(self, which: int, end: int) -> None:
        """A checkpoint loses one group's part: it never matches again in any tier."""
        long = [ids for ids in self.prompts if len(ids) >= BLOCK]
        ids = long[which % len(long)][: end * BLOCK]
        chain = self.memory.store.chain(ids)
        self.seen.event("one group's state lost", fault=True)
        self.memory.store.drop_checkpoint(chain.keys[-1])
        assert not self.restorable(ids[: len(chain.keys) * BLOCK])


class WriteThroughHistories(TightHistories):
    write = "write_through"


class DeviceOnlyHistories(TightHistories):
    host_pages = 0


class SsdHistories(TightHistories):
    """Below a small host lies an SSD that keeps what it holds over restarts, unless its bytes go bad or it fails."""

    host_pages = 24
    ssd_bytes = 80 * 4096

    harmed = False

    @precondition(lambda self: self.fault_is_due(4))
    @rule(stops=st.sampled_from(["clean", "synced", "unsynced"]), cut=st.integers(0, 3 * 4096))
    def restart(self, stops: str, cut: int) -> None:
        """Of the worker: every request is lost, and memory, but not what was acknowledged on the SSD. Where it does
        not stop clean it leaves its files as they are, the newest perhaps with a torn end that was never synced."""
        assert self.memory.ssd is not None
        self.seen.event(f"worker stopped, {stops}", fault=True)
        for request in list(self.requests):
            self.finish(request)
        self.memory.store.check()
        if stops == "synced":
            self.memory.ssd.log.flush(10)
        acknowledged = set(self.memory.store._tiers.ssd.checkpoints) if stops != "unsynced" else set()
        left = None if stops == "clean" else self.files_of_the_dead(cut if stops == "unsynced" else 0)
        self.memory.close()
        if left is not None:
            shutil.rmtree(Path(self.run_dir) / "ssd")
            left.rename(Path(self.run_dir) / "ssd")
        self.make_again()
        if not self.harmed:
            assert acknowledged <= self.memory.store._tiers.ssd.checkpoints.keys()
        self.harmed = False

    def make_again(self) -> None:
        self.memory = make_memory(self.layout, self.config, "twin")

    def files_of_the_dead(self, cut: int) -> Path:
        """A copy of the SSD folder while it may still be written, the end of its newest segment cut off."""
        source, target = Path(self.run_dir) / "ssd", Path(self.run_dir) / "left"
        for path in sorted(source.rglob("*")):
            copy = target / path.relative_to(source)
            copy.mkdir(parents=True) if path.is_dir() else copy.write_bytes(bytes_of(path))
        newest = max(target.glob("*/*.segment"), default=None)
        if newest is not None:
            os.truncate(newest, max(0, newest.stat().st_size - cut))
        return target

    @precondition(lambda self: self.memory.ssd_failure is None and self.fault_is_due(16))
    @rule()
    def disk_fails(self) -> None:
        """The tier is off until the worker starts again; nothing there matches, and serving goes on."""
        assert self.memory.ssd is not None
        self.seen.event("disk failed", fault=True)
        self.memory.ssd.log._writer.fail("the disk is gone")
        self.memory.settle()
        assert not self.memory.store._tiers.ssd.checkpoints
        self.harmed = True

    @precondition(lambda self: self.fault_is_due(4) and self.segments())
    @rule(which=st.integers(0, 1 << 30), bit=st.integers(0, 7))
    def flip_on_disk(self, which: int, bit: int) -> None:
        path = self.segments()[which % len(self.segments())]
        with open(path, "r+b") as file:
            file.seek(which % path.stat().st_size)
            byte = file.read(1)[0]
            file.seek(which % path.stat().st_size)
            file.write(bytes([byte ^ 1 << bit]))
        self.seen.event("bit of a segment flipped", fault=True)
        self.harmed = True

    @precondition(lambda self: self.fault_is_due(8) and self.segments())
    @rule(which=st.integers(0, 1000))
    def delete_segment(self, which: int) -> None:
        self.segments()[which % len(self.segments())].unlink()
        self.seen.event("segment deleted", fault=True)
        self.harmed = True

    @invariant()
    def quota_holds(self) -> None:
        if hasattr(self, "memory"):
            assert sum(path.stat().st_size for path in self.segments()) <= self.ssd_bytes
            assert self.memory.ssd is not None
            self.memory.ssd.log.segments.check()

    def segments(self) -> list[Path]:
        assert self.memory.ssd is not None
        self.memory.ssd.log.flush(10)
        return sorted(path for path in Path(self.run_dir).glob("ssd/*/*.segment") if path.stat().st_size)


class SsdWrittenThroughHistories(SsdHistories):
    ssd_write = "write_through"


class SsdSelectiveHistories(SsdHistories):
    host_pages = 0
    ssd_write = "selective"


def blocks_of(ids: tuple[int, ...], start: int, upto: int) -> list[tuple[int, ...]]:
    """The prefixes that end with a block, after `start` and up to `upto`."""
    return [ids[:at] for at in range(start // BLOCK * BLOCK + BLOCK, upto + 1, BLOCK)]


def bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:  # the writer dropped it meanwhile
        return b""


@pytest.fixture(scope="module")
def met(say: Callable[[str], None]) -> Iterator[HistoryCounts]:
    """What all histories of this file met, printed at the end."""
    total = HistoryCounts()
    yield total
    say("\n" + total.told("all"))


Run = Callable[[type[Histories], int], None]


@pytest.fixture
def run(examples: Callable[[int], int], say: Callable[[str], None], met: HistoryCounts) -> Run:
    """Runs `count` histories of a machine under --soak, a tenth of that otherwise."""

    def run_histories(machine: type[Histories], count: int) -> None:
        machine.counts = HistoryCounts()
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples(count),
                stateful_step_count=STEPS,
                deadline=None,
                suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
            ),
        )
        say("\n" + machine.counts.told(machine.__name__))
        assert machine.counts.median_events >= MEDIAN_EVENTS
        met.add(machine.counts)

    return run_histories


def test_unbounded_pool_hits_exactly_what_was_committed(run: Run) -> None:
    run(Histories, 600)


def test_tight_pools_with_wrong_bytes(run: Run) -> None:
    run(TightHistories, 1400)


def test_tight_pools_written_through(run: Run) -> None:
    run(WriteThroughHistories, 700)


def test_tight_device_without_host(run: Run) -> None:
    run(DeviceOnlyHistories, 600)


def test_tight_pools_above_an_ssd(run: Run) -> None:
    run(SsdHistories, 900)


def test_tight_pools_above_an_ssd_written_through(run: Run) -> None:
    run(SsdWrittenThroughHistories, 400)


def test_tight_device_above_an_ssd_of_what_is_used_again(run: Run) -> None:
    run(SsdSelectiveHistories, 400)

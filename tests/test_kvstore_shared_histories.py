"""Random histories of several workers over one arena, that die between any two lines of its code, in the critical
section too, against twins that know only tokens.

After every step: all granules are in one place, every worker's store adds up, every live request still reads its own
bytes, and whoever looks finds all that is stored. `pytest -s` prints what the histories met.
"""

import fcntl
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from forebay.kvstore import shared_file
from forebay.kvstore.config import StoreConfig
from forebay.kvstore.memory import Memory
from forebay.kvstore.shared_table import FREE, READY
from forebay.kvstore.store import Lease, Refusal
from tests.history_counts import HistoryCounts
from tests.kvstore_twin import BLOCK, OWNER, compute, tiny_layout, verify
from tests.shared_workers import Node, shared_files

LAYOUT = tiny_layout()
WORKERS = 3
STEPS, LEAST_EVENTS, MEDIAN_EVENTS = 64, 20, 40
Ids = tuple[int, ...]


@dataclass
class Worker:
    memory: Memory
    requests: list[tuple[Ids, Lease]] = field(default_factory=list)
    computed: set[Ids] = field(default_factory=set)


class SharedHistories(RuleBasedStateMachine):
    """`committed` and `kept` are the twin: every prefix whose rows, or whose state, any worker ever made matchable."""

    counts = HistoryCounts()
    ssd_bytes = 0
    write = "write_back"

    def __init__(self) -> None:
        super().__init__()
        self.seen = HistoryCounts(events=[0])
        self.run_dir = tempfile.mkdtemp()
        self.prompts: list[Ids] = [()]
        self.committed: set[Ids] = set()
        self.kept: set[Ids] = set()
        self.workers: list[Worker] = []

    @initialize(host_pages=st.sampled_from([12, 24, 90]))
    def start(self, host_pages: int) -> None:
        config = StoreConfig(
            device_bytes=24 * LAYOUT.page_bytes,
            host_bytes=host_pages * LAYOUT.page_bytes,
            run_dir=self.run_dir,
            checkpoints="prompt_end+junction",
            write=self.write,  # type: ignore[arg-type]
            ssd_path=str(Path(self.run_dir) / "ssd") if self.ssd_bytes else None,
            ssd_bytes=self.ssd_bytes,
            ssd_queue_bytes=1 << 20,
        )
        self.node = Node(LAYOUT, config)
        self.workers = [Worker(self.node.worker()) for _ in range(WORKERS)]

    def teardown(self) -> None:
        for worker in self.workers:
            self.ended(worker)
            worker.memory.store.check()
            self.seen.end(worker.memory.store.stats())
            worker.memory.close()
        left = shared_files(Path(self.run_dir))
        shutil.rmtree(self.run_dir)
        assert not left, "the last to leave removes it"
        if sys.exc_info()[0] is None:
            assume(self.seen.events[-1] >= LEAST_EVENTS)
            self.counts.add(self.seen)

    @rule(at=st.integers(0, WORKERS - 1), which=st.integers(0, 99), tail=st.lists(st.integers(0, 1), max_size=14))
    def turn(self, at: int, which: int, tail: list[int]) -> None:
        """One whole request on any worker, that extends an earlier prompt of any, or sends it again."""
        self.seen.event("whole turn")
        self.serve(self.workers[at], self.prompt(which, tail))

    @precondition(lambda self: any(len(worker.requests) < 2 for worker in self.workers))
    @rule(at=st.integers(0, WORKERS - 1), which=st.integers(0, 99), tail=st.lists(st.integers(0, 1), max_size=9))
    def open(self, at: int, which: int, tail: list[int]) -> None:
        """A request that stays."""
        worker, ids = self.workers[at], self.prompt(which, tail)
        lease = self.opened(worker, ids)
        if lease is not None:
            worker.requests.append((ids[: lease.hit_tokens], lease))
        self.seen.event("opened")

    @precondition(lambda self: any(worker.requests for worker in self.workers))
    @rule(which=st.integers(0, 99))
    def close(self, which: int) -> None:
        busy = [worker for worker in self.workers if worker.requests]
        worker = busy[which % len(busy)]
        worker.requests.pop(which % len(worker.requests))[1].close()
        self.seen.event("closed")

    @precondition(lambda self: self.ssd_bytes > 0)
    @rule(
        at=st.integers(0, WORKERS - 1),
        which=st.integers(0, 99),
        most_bytes=st.sampled_from([200, 2000, 1 << 20]),
        whole=st.booleans(),
    )
    def comes_up_ahead(self, at: int, which: int, most_bytes: int, whole: bool) -> None:
        """What a prompt that waits has on the SSD comes up; or it is cancelled before all has come."""
        self.bring_ahead(self.workers[at], self.prompt(which, [0]), most_bytes, whole)
        self.seen.event("brought ahead" if whole else "brought ahead, cancelled")

    @precondition(lambda self: self.fault_is_due(6))
    @rule(at=st.integers(0, WORKERS - 1), which=st.integers(0, 99), lines=st.integers(20, 600))
    def dies_at_work(self, at: int, which: int, lines: int) -> None:
        """A worker is killed somewhere in a turn, and another takes its place."""
        worker, ids = self.workers[at], self.prompt(which, [0, 1, 1])
        host = worker.memory.host
        assert host is not None
        table = host.directory.table

        def act() -> None:
            self.bring_ahead(worker, ids, 1 << 20, True)
            self.serve(worker, ids)

        died = self.node.killed_in(worker.memory, act, lines)
        where = "in the critical section" if table.get("dirty") else "between two steps" if died else "after a turn"
        halfway = bool(((table.state != FREE) & (table.state != READY)).any())
        self.seen.event(f"worker killed {where}{', in mid-put' if halfway else ''}", fault=True)
        self.replace(at)

    @precondition(lambda self: self.fault_is_due(12))
    @rule(at=st.integers(0, WORKERS - 1))
    def dies_idle(self, at: int) -> None:
        self.node.kill(self.workers[at].memory)
        self.seen.event("worker killed with its requests", fault=True)
        self.replace(at)

    @precondition(lambda self: self.fault_is_due(8))
    @rule(at=st.integers(0, WORKERS - 1))
    def stops(self, at: int) -> None:
        """In order, with all it holds."""
        self.ended(self.workers[at])
        self.workers[at].memory.close()
        self.seen.event("worker stopped")
        self.replace(at)

    @precondition(lambda self: self.fault_is_due(8))
    @rule(at=st.integers(0, 1 << 16), bit=st.integers(0, 7))
    def flip(self, at: int, bit: int) -> None:
        host = self.workers[0].memory.host
        assert host is not None
        host.directory.table.granules.reshape(-1)[at % host.directory.table.granules.size] ^= 1 << bit
        self.seen.event("bit of the arena flipped", fault=True)

    @precondition(lambda self: self.fault_is_due(20))
    @rule(at=st.integers(0, WORKERS - 1), which=st.integers(0, 99))
    def lock_hangs(self, at: int, which: int) -> None:
        """Somebody stays in the critical section: others do without the tier."""
        with open(shared_files(Path(self.run_dir))[0], "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self.serve(self.workers[at], self.prompt(which, [1]))
        self.seen.event("lock held too long", fault=True)

    @invariant()
    def adds_up(self) -> None:
        for worker in self.workers:
            assert worker.memory.host is not None
            worker.memory.host.directory.check()
            worker.memory.store.check()
            for ids, lease in worker.requests:
                verify(worker.memory, lease, ids, len(ids))

    @invariant()
    def all_is_found(self) -> None:
        """A look-up through any worker sees every checkpoint and run that any worker stored, where no bytes went wrong
        and nobody had to do without."""
        if self.seen.faults.keys() & {"bit of the arena flipped", "lock held too long"}:
            return
        for worker in self.workers:
            host, index = worker.memory.host, worker.memory.store._tiers.host
            assert host is not None
            worker.memory.discover(worker.memory.store.chain([0]))
            table = host.directory.table
            for entry in (table.state == READY).nonzero()[0].tolist():
                unit = host.directory.entries.stored(entry).unit
                last = unit.label.keys[-1]
                assert index.span(unit.label.group, last) if unit.rows else last in index.checkpoints

    def serve(self, worker: Worker, ids: Ids) -> None:
        lease = self.opened(worker, ids)
        if lease is None:
            return
        with lease:
            at = lease.hit_tokens
            for end in (*lease.checkpoints, len(ids)):
                compute(worker.memory, lease, ids, at, end)
                self.committed.update(ids[:block] for block in range(BLOCK, end + 1, BLOCK))
                worker.memory.commit(lease, end)
                if end in lease.checkpoints:
                    self.kept.add(ids[:end])
                    worker.memory.checkpoint(lease, end)
                at = end
            worker.computed.update(ids[:end] for end in range(BLOCK, len(ids) + 1, BLOCK))

    def bring_ahead(self, worker: Worker, ids: Ids, most_bytes: int, whole: bool) -> None:
        memory = worker.memory
        before = memory.store.stats().prefetched_bytes.get("ssd", 0)
        ahead = memory.ahead(memory.store.chain(ids), len(ids), most_bytes)
        assert ahead is not None
        assert ahead.total_bytes <= most_bytes
        while not ahead.advance() and whole:
            ahead.wait(10)
        ahead.close()
        if memory.store.stats().prefetched_bytes.get("ssd", 0) > before:
            self.seen.hits["came up ahead"] += 1

    def opened(self, worker: Worker, ids: Ids) -> Lease | None:
        """Its hit is right to the byte, and of what was once made matchable."""
        memory = worker.memory
        lease = memory.open(OWNER, memory.store.chain(ids), n_prompt=len(ids), capacity_tokens=len(ids))
        if isinstance(lease, Refusal):
            return None
        verify(memory, lease, ids, lease.hit_tokens)
        self.seen.hit(lease.hit)
        if lease.hit_tokens:
            assert ids[: lease.hit_tokens] in self.kept
            assert all(ids[:end] in self.committed for end in range(BLOCK, lease.hit_tokens + 1, BLOCK))
            if ids[: lease.hit_tokens] not in worker.computed:
                self.seen.hits["what another worker stored"] += 1
        return lease

    def prompt(self, which: int, tail: list[int]) -> Ids:
        ids = self.prompts[which % len(self.prompts)][:48] + tuple(tail) or (1,)
        self.prompts.append(ids)
        return ids

    def replace(self, at: int) -> None:
        self.workers[at] = Worker(self.node.worker())

    def ended(self, worker: Worker) -> None:
        for _, lease in worker.requests:
            lease.close()
        worker.requests.clear()

    def fault_is_due(self, every: int) -> bool:
        return self.seen.events[-1] % every == every - 1


class SharedAboveSsds(SharedHistories):
    """What leaves the arena goes to the log of the worker that needed its room."""

    ssd_bytes = 80 * 4096


class SharedWrittenThrough(SharedHistories):
    write = "write_through"


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_file, "LOCK_S", 0.0)
    monkeypatch.setattr(shared_file, "RETRY_S", 0.0)


@pytest.mark.parametrize(
    ("machine", "count"), [(SharedHistories, 300), (SharedWrittenThrough, 100), (SharedAboveSsds, 100)]
)
def test_workers_share_an_arena_and_die(
    machine: type[SharedHistories], count: int, examples: Callable[[int], int]
) -> None:
    machine.counts = HistoryCounts()
    checks = [HealthCheck.filter_too_much, HealthCheck.too_slow]
    run_machine(
        machine,
        settings=settings(
            max_examples=examples(count), stateful_step_count=STEPS, deadline=None, suppress_health_check=checks
        ),
    )
    print("\n" + machine.counts.told(machine.__name__))
    assert machine.counts.median_events >= MEDIAN_EVENTS

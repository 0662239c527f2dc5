"""The random histories of the store, above a cluster-wide pool that fails in every way."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from fake_pool import Objects, pool_of
from hypothesis.stateful import initialize, precondition, rule

from forebay.kvstore import pool_fetch, pool_tier, pool_traffic
from forebay.kvstore.memory import make_memory
from forebay.kvstore.pool_object import Bytes, PoolObject
from forebay.kvstore.pool_traffic import PoolTraffic
from tests.test_kvstore_histories import LAYOUT, Run, TightHistories
from tests.test_kvstore_histories import met as met  # fixtures of that file
from tests.test_kvstore_histories import run as run

CLOCK_FREE = {
    (pool_tier, "LOOK_AFTER_S"): 1e9,
    (pool_tier, "ASK_AGAIN_S"): 1e9,
    (pool_traffic, "AWAY_S"): 0.0,
    (pool_traffic, "TRY_AGAIN_S"): 0.0,
    (pool_fetch, "TRY_AGAIN_S"): 0.0,
}
"""What the background does at some time it does never here, or at once: a history must run the same again."""


put = PoolTraffic.put


def put_at_once(traffic: PoolTraffic, unit: PoolObject, rows: Callable[[], Bytes | None]) -> bool:
    return put(traffic, unit, rows) and traffic.flush(10)


class PoolHistories(TightHistories):
    """Above the pool lies too little for one session. A worker that starts anew finds there what it wrote."""

    host_pages = 24
    pool_write = "write_through"

    @initialize(policy=st.sampled_from(["prompt_end", "prompt_end+junction", "prompt_end+junction+interval:8"]))
    def start(self, policy: str) -> None:
        self.objects = Objects()
        self.patches = ExitStack()
        patch = self.patches.enter_context(pytest.MonkeyPatch.context())
        for (module, name), value in CLOCK_FREE.items():
            patch.setattr(module, name, value)
        patch.setattr(PoolTraffic, "put", put_at_once)
        self.patches.enter_context(pool_of(self.objects))
        super().start(policy)
        self.memory.close()
        pool = {"pool": "mooncake://127.0.0.1:1", "pool_queue_bytes": 1 << 16, "pool_ask_s": 60.0, "pool_read_s": 60.0}
        self.config = replace(self.config, pool_write=self.pool_write, **pool)  # type: ignore[arg-type]
        self.join()

    def join(self) -> None:
        self.memory = make_memory(LAYOUT, self.config, "twin")
        assert self.memory.pool_tier is not None
        assert self.memory.pool_tier.traffic.wait_joined(10)

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            if hasattr(self, "patches"):
                self.patches.close()

    def adds_up(self) -> None:
        if hasattr(self, "memory"):
            assert self.memory.pool_tier is not None
            assert self.memory.pool_tier.traffic.flush(10)
            self.memory.settle()
        super().adds_up()

    def expected_hit(self, ids: tuple[int, ...]) -> int:
        """Once the pool has said what it has."""
        chain = self.memory.store.chain(ids)
        self.memory.discover(chain)
        while self.memory.waits(chain):
            self.memory.wait(1)
        self.memory.discover(chain)
        return super().expected_hit(ids)

    @precondition(lambda self: len(self.prompts) > 1)
    @rule(which=st.integers(0, 1000))
    def probe(self, which: int) -> None:
        """A look-up changes nothing, once the pool has said what it has."""
        ids = self.prompts[1 + which % (len(self.prompts) - 1)]
        expected, before = self.expected_hit(ids), self.memory.store.stats()
        self.seen.event("probed")
        assert self.memory.store.lookup(self.memory.store.chain(ids), len(ids)).tokens == expected
        assert self.memory.store.stats() == before

    @precondition(lambda self: not self.requests and self.fault_is_due(4))
    @rule()
    def restart(self) -> None:
        self.memory.close()
        self.join()
        self.seen.event("worker started anew", fault=True)

    @precondition(lambda self: self.objects.held and self.fault_is_due(4))
    @rule(which=st.integers(0, 1000), at=st.integers(0, 4000))
    def spoil(self, which: int, at: int) -> None:
        self.objects.spoil(which, at)
        self.seen.event("byte of an object flipped", fault=True)

    @precondition(lambda self: self.objects.held and self.fault_is_due(8))
    @rule(which=st.integers(0, 2))
    def evict(self, which: int) -> None:
        self.objects.drop(which)
        self.seen.event("a third of all objects evicted", fault=True)

    @precondition(lambda self: self.fault_is_due(8))
    @rule(what=st.sampled_from(["master away", "pool full", "master started anew"]))
    def fail(self, what: str) -> None:
        if what == "master started anew":
            self.objects.restart()
        self.objects.away, self.objects.full = what == "master away", what == "pool full"
        self.seen.event(what, fault=True)

    @precondition(lambda self: self.objects.away or self.objects.full)
    @rule()
    def heal(self) -> None:
        self.objects.away = self.objects.full = False


class PoolSelectiveHistories(PoolHistories):
    host_pages = 0
    pool_write = "selective"


def test_tight_pools_above_a_pool_that_fails(run: Run) -> None:
    run(PoolHistories, 500)
    assert PoolHistories.counts.hits["pool"] > 0


def test_tight_device_above_a_pool_of_what_is_used_again(run: Run) -> None:
    run(PoolSelectiveHistories, 200)

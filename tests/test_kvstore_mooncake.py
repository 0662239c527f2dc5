"""The cluster-wide tier on a real Mooncake Store: what one worker put there any worker finds, and nothing wrong."""

import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from mooncake_rig import config, flush, memory_of, needs_mooncake, pool_of, shared, wait_until

from forebay.kvstore.memory import Memory
from forebay.kvstore.pool_master import KeptMaster
from tests.kvstore_twin import open_lease, pushed_out, serve, tiny_layout

needs_mooncake()
LAYOUT = tiny_layout()
IDS = list(range(30))


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeptMaster]:
    with KeptMaster() as master, shared(tmp_path_factory.mktemp("pool"), master, LAYOUT):
        yield master


def names(master: KeptMaster) -> list[str]:
    """All that the master knows of."""
    with urllib.request.urlopen(f"http://127.0.0.1:{master.metrics_port}/get_all_keys", timeout=5) as answer:
        return sorted(answer.read().decode().split())


def test_a_hit_in_the_pool_comes_back(tmp_path: Path, master: KeptMaster) -> None:
    with memory_of(LAYOUT, config(tmp_path, master, LAYOUT), "comes back") as memory:
        ids = pushed_out(memory, "pool")
        flush(memory)
        assert serve(memory, [*ids, 1]) == (28, None)
        stats = memory.store.stats()
        assert stats.hit_tokens == {"pool": 28}
        assert stats.restored_bytes == {"pool": 2 * 28 * (8 + 4) + 4 * 90}
        assert stats.pool_events == {}


def test_what_waits_to_be_sent_is_a_hit_too(tmp_path: Path, master: KeptMaster) -> None:
    with memory_of(LAYOUT, config(tmp_path, master, LAYOUT), "waits") as memory:
        traffic = pool_of(memory).traffic
        send = traffic._send
        traffic._send = lambda client, batch: time.sleep(0.5) or send(client, batch)  # type: ignore[method-assign]
        ids = pushed_out(memory, "pool")
        assert traffic._waiting
        assert serve(memory, [*ids, 1]) == (28, None)


@pytest.mark.parametrize("longer_by", [1, 3, 17])
def test_another_worker_finds_it(tmp_path: Path, master: KeptMaster, longer_by: int) -> None:
    made = config(tmp_path, master, LAYOUT)
    with memory_of(LAYOUT, made, f"finds {longer_by}") as one, memory_of(LAYOUT, made, f"finds {longer_by}") as other:
        serve(one, IDS)
        flush(one)
        assert serve(other, [*IDS, *range(100, 100 + longer_by)]) == (28, "never_stored" if longer_by > 2 else None)
        assert other.store.stats().hit_tokens == {"pool": 28}
        assert serve(other, [*IDS[:27], 7, 7, 7, 7]) == (0, "no_checkpoint"), "no state where they part"


def test_a_prompt_that_grows_turn_by_turn_is_found_at_its_newest_end(tmp_path: Path, master: KeptMaster) -> None:
    made = config(tmp_path, master, LAYOUT, device_bytes=80 * LAYOUT.page_bytes)
    with memory_of(LAYOUT, made, "turns") as one, memory_of(LAYOUT, made, "turns") as other:
        for end in (9, 22, 31, 57, 90):
            serve(one, list(range(end)))
        flush(one)
        for end in (9, 22, 31, 57, 90):
            assert serve(other, [*range(end), 500]) == (end // 4 * 4, None)


def test_what_a_live_request_writes_is_pinned(tmp_path: Path, master: KeptMaster) -> None:
    before, pinned = set(names(master)), soft_pinned(master)
    with memory_of(LAYOUT, config(tmp_path, master, LAYOUT), "pinned") as memory:
        serve(memory, IDS[:11])
        flush(memory)
        new = set(names(master)) - before
    assert len(new) >= 3
    assert soft_pinned(master) == pinned + len(new)


def soft_pinned(master: KeptMaster) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{master.metrics_port}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return next(int(float(line.split()[-1])) for line in lines if line.startswith("master_soft_pin_key_count"))


def test_another_model_finds_nothing(tmp_path: Path, master: KeptMaster) -> None:
    made = config(tmp_path, master, LAYOUT)
    with memory_of(LAYOUT, made, "one model") as one, memory_of(LAYOUT, made, "other model") as other:
        serve(one, IDS)
        flush(one)
        assert serve(other, [*IDS, 1]) == (0, "never_stored")


def test_two_writers_store_it_once(tmp_path: Path, master: KeptMaster) -> None:
    made = config(tmp_path, master, LAYOUT, pool_ask_s=1e-9)
    with memory_of(LAYOUT, made, "once") as one, memory_of(LAYOUT, made, "once") as other:
        serve(one, IDS)
        flush(one)
        before = names(master)
        pool_of(other)._ask = lambda chain: None  # type: ignore[method-assign]
        assert serve(other, IDS) == (0, "never_stored")
        flush(other)
        assert other.store.stats().pool_events == {}
        assert names(master) == before
        assert len(before) >= 4, "a checkpoint and the runs of both groups"


@pytest.mark.parametrize("at", [0, 70, -1, "cut"])
def test_wrong_bytes_are_a_miss_and_give_way_to_right_ones(tmp_path: Path, master: KeptMaster, at: int | str) -> None:
    with memory_of(LAYOUT, config(tmp_path, master, LAYOUT), f"wrong {at}") as memory:
        ids = pushed_out(memory, "pool")
        flush(memory)
        spoil(memory, at)
        assert serve(memory, [*ids, 1]) == (0, "corrupt")
        assert memory.store.stats().pool_events == {"corrupt": 1}
        flush(memory)
        serve(memory, [9] * 40)
        assert serve(memory, [*ids, 1]) == (28, None)
        assert memory.store.stats().hit_tokens == {"pool": 28}


def spoil(memory: Memory, at: int | str) -> None:
    """A byte of the checkpoint's object is another one, or its last is missing."""
    tier = pool_of(memory)
    held = next(held for held in tier._held.values() if held.unit.label.group == "states")
    store = tier.traffic._client._store  # type: ignore[union-attr]
    image = bytearray(store.get(held.unit.name))
    assert len(image) == held.unit.total_bytes
    if isinstance(at, int):
        image[at] ^= 1
    else:
        del image[-1]
    assert store.remove(held.unit.name, True) == 0
    assert store.put(held.unit.name, bytes(image)) == 0


def test_what_the_pool_gave_up_is_a_miss(tmp_path: Path, master: KeptMaster) -> None:
    with memory_of(LAYOUT, config(tmp_path, master, LAYOUT), "gave up") as memory:
        ids = pushed_out(memory, "pool")
        flush(memory)
        tier = pool_of(memory)
        for name in list(tier._held):
            tier.traffic._client._store.remove(name, True)  # type: ignore[union-attr]
        tokens, miss = serve(memory, [*ids, 1])
        assert (tokens, miss in ("evicted", "sibling_missing")) == (0, True), "one group may lie on the device too"
        assert memory.store.stats().pool_events["gone"] > 0


def test_it_looks_after_what_it_knows_of(tmp_path: Path, master: KeptMaster) -> None:
    with memory_of(LAYOUT, config(tmp_path, master, LAYOUT), "looks after") as memory:
        ids = pushed_out(memory, "pool")
        flush(memory)
        tier = pool_of(memory)
        for name in list(tier._held):
            tier.traffic._client._store.remove(name, True)  # type: ignore[union-attr]
        wait_until(lambda: memory.settle() or not tier._held, 10, "it goes on believing")
        assert memory.store.lookup(memory.store.chain(ids), 30).tokens == 0


def test_a_full_queue_is_skipped_and_counted(tmp_path: Path, master: KeptMaster) -> None:
    with memory_of(LAYOUT, config(tmp_path, master, LAYOUT, pool_queue_bytes=1), "queue") as memory:
        traffic = pool_of(memory).traffic
        traffic._send = lambda client, batch: time.sleep(0.3) or [None] * len(batch)  # type: ignore[method-assign]
        started = time.monotonic()
        for seed in range(8):
            serve(memory, [seed] * 40)
        assert time.monotonic() - started < 2
        assert memory.store.stats().pool_events["skipped"] > 0


def test_only_what_is_used_again_goes_there_where_the_policy_is_selective(tmp_path: Path, master: KeptMaster) -> None:
    made = config(tmp_path, master, LAYOUT, pool_write="selective", device_bytes=60 * LAYOUT.page_bytes)
    with memory_of(LAYOUT, made, "selective") as memory:
        serve(memory, IDS)
        flush(memory)
        assert not pool_of(memory)._held
        serve(memory, [*IDS, 1])
        flush(memory)
        assert pool_of(memory)._held


def test_what_waits_for_an_answer_of_the_pool_waits_no_longer_than_it_is_to(tmp_path: Path, master: KeptMaster) -> None:
    with memory_of(LAYOUT, config(tmp_path, master, LAYOUT, pool_ask_s=0.1), "bound") as memory:
        traffic = pool_of(memory).traffic
        missing = traffic._exist
        traffic._exist = lambda labels: time.sleep(1) or missing(labels)  # type: ignore[method-assign]
        chain = memory.store.chain(IDS)
        memory.lookup(chain, len(IDS))
        assert memory.waits(chain)
        waited_s = wait_until(lambda: not memory.waits(chain), 5, "it waits for good")
        assert waited_s < 0.9
        with open_lease(memory, IDS) as lease:
            assert lease.hit_tokens == 0


def test_sessions_beside_each_other_answer_right(tmp_path: Path, master: KeptMaster) -> None:
    """Workers of one pool take each other's sessions over, turn by turn, above all other tiers."""
    low = {"host_bytes": 14 * LAYOUT.page_bytes, "ssd_bytes": 1 << 20, "ssd_queue_bytes": 1 << 20}
    made = config(tmp_path, master, LAYOUT, **low, device_bytes=30 * LAYOUT.page_bytes, ssd_path=str(tmp_path / "ssd"))
    rng, hits = np.random.default_rng(1), 0
    with memory_of(LAYOUT, made, "beside") as one, memory_of(LAYOUT, replace(made, host_bytes=0), "beside") as other:
        for _ in range(60):
            memory = (one, other)[int(rng.integers(2))]
            first, turns = int(rng.integers(5)), int(rng.integers(1, 6))
            tokens, _ = serve(memory, [first, *range(9 * turns)])
            hits += tokens > 0
            memory.store.check()
        assert hits > 30
        assert min(memory.store.stats().hit_tokens.get("pool", 0) for memory in (one, other)) > 0

"""Quotas and times to live of classes, one by one."""

from pathlib import Path
from typing import Any

import pytest

from forebay.kvstore.config import ClassShare, StoreConfig
from forebay.kvstore.memory import Memory, make_memory
from forebay.kvstore.store import Lease, Store
from forebay.kvstore.turn import Turn
from tests.kvstore_twin import OWNER, compute, tiny_layout, verify
from tests.shared_workers import Node

LAYOUT = tiny_layout()
PAGE = LAYOUT.page_bytes
PROMPT_PAGES = 2 * 2 + 2 + 4
"""Of 24 tokens: two pages of rows and one of index keys in two layers each, and a checkpoint."""


def config_of(tmp_path: Path, *classes: ClassShare, **changes: Any) -> StoreConfig:
    kept = {"device_bytes": 200 * PAGE, "run_dir": str(tmp_path), "checkpoints": "prompt_end", **changes}
    return StoreConfig(classes=classes, **kept)


def memory_of(tmp_path: Path, *classes: ClassShare, **changes: Any) -> Memory:
    return make_memory(LAYOUT, config_of(tmp_path, *classes, **changes), "twin")


def serve(memory: Memory, ids: list[int], class_name: str, now: float = 0.0) -> int:
    """One whole turn: its hit."""
    turn = Turn(class_name=class_name, now=now)
    lease = memory.open(OWNER, memory.store.chain(ids), n_prompt=len(ids), capacity_tokens=len(ids), turn=turn)
    assert isinstance(lease, Lease)
    with lease:
        verify(memory, lease, ids, lease.hit_tokens)
        compute(memory, lease, ids, lease.hit_tokens, len(ids) // 4 * 4)
        memory.commit(lease, len(ids) // 4 * 4)
        memory.checkpoint(lease, len(ids) // 4 * 4)
        memory.store.check()
    memory.store.check()
    return lease.hit_tokens


def found(memory: Memory, ids: list[int], now: float) -> int:
    memory.advance(now)
    return memory.lookup(memory.store.chain(ids), len(ids)).tokens


def prompt(number: int) -> list[int]:
    return [number] * 25


def test_a_class_over_its_quota_evicts_its_own_first(tmp_path: Path) -> None:
    memory = memory_of(tmp_path, ClassShare(name="batch", device_bytes=2 * PROMPT_PAGES * PAGE))
    serve(memory, prompt(99), "agent")
    for number in range(5):
        serve(memory, prompt(number), "batch")
    assert found(memory, prompt(99), 0) == 24
    assert [found(memory, prompt(number), 0) for number in range(5)] == [0, 0, 0, 24, 24]
    assert memory.store._tiers.device.cached_pages["batch"] == 2 * PROMPT_PAGES
    assert memory.store.stats().evicted_pages == {("device", "quota"): 3 * PROMPT_PAGES}
    memory.close()


def test_what_exceeds_the_device_goes_to_the_host_where_the_class_may_have_more(tmp_path: Path) -> None:
    share = ClassShare(name="batch", device_bytes=PROMPT_PAGES * PAGE, host_bytes=2 * PROMPT_PAGES * PAGE)
    memory = memory_of(tmp_path, share, host_bytes=300 * PAGE)
    for number in range(4):
        serve(memory, prompt(number), "batch", 10 * number)
        assert found(memory, prompt(number), 10 * number) == 24
    assert memory.store._tiers.device.cached_pages["batch"] == PROMPT_PAGES
    assert sum(found(memory, prompt(number), 30) == 24 for number in range(3)) >= 1
    assert ("device", "quota") not in memory.store.stats().evicted_pages, "nothing is lost that may lie below"
    memory.close()


def test_one_prompt_larger_than_its_classs_part_of_the_device_is_hit_below(tmp_path: Path) -> None:
    memory = memory_of(tmp_path, ClassShare(name="batch", device_bytes=PROMPT_PAGES * PAGE), host_bytes=300 * PAGE)
    ids = list(range(101))
    serve(memory, ids, "batch")
    assert memory.store._tiers.device.cached_pages["batch"] <= PROMPT_PAGES
    assert serve(memory, ids, "batch") == 100
    memory.close()


def test_the_host_quota_is_the_nodes(tmp_path: Path) -> None:
    share = ClassShare(name="batch", host_bytes=2 * PROMPT_PAGES * PAGE)
    node = Node(LAYOUT, config_of(tmp_path, share, host_bytes=300 * PAGE, write="write_through"))
    workers = [node.worker(), node.worker()]
    for number in range(4):
        serve(workers[number % 2], prompt(number), "batch", number)
        serve(workers[number % 2], prompt(90 + number), "agent", number)
    third = node.worker()
    third.advance(4)
    third.discover(third.store.chain([]))
    held = third.store._tiers.host.held_pages
    assert (0 < held["batch"] <= 2 * PROMPT_PAGES, held["agent"]) == (True, 4 * PROMPT_PAGES)
    assert all(found(third, prompt(90 + number), 4) == 24 for number in range(4))
    for each in (*workers, third):
        each.close()


def test_the_ssd_quota_holds_over_restarts(tmp_path: Path) -> None:
    share = ClassShare(name="batch", ssd_bytes=2 * PROMPT_PAGES * PAGE)
    options = {"ssd_path": str(tmp_path / "ssd"), "ssd_bytes": 1 << 20, "ssd_write": "write_through"}
    memory = memory_of(tmp_path, share, **options)
    for number in range(4):
        serve(memory, prompt(number), "batch")
    serve(memory, prompt(99), "agent")
    assert memory.store._tiers.ssd.held_pages == {"batch": 2 * PROMPT_PAGES, "agent": PROMPT_PAGES}
    memory.close()


@pytest.mark.parametrize("later", ["batch", "agent", "other"])
def test_a_use_by_any_class_keeps_for_as_long_as_that_class_does(tmp_path: Path, later: str) -> None:
    memory = memory_of(tmp_path, ClassShare(name="batch", ttl_s=10), ClassShare(name="agent", ttl_s=60))
    serve(memory, prompt(1), "batch", 100)
    assert found(memory, prompt(1), 109.9) == 24
    assert serve(memory, prompt(1), later, 109.9) == 24
    assert (found(memory, prompt(1), 119.8), found(memory, prompt(1), 120)) == (24, 0 if later == "batch" else 24)
    assert found(memory, prompt(1), 170) == (24 if later == "other" else 0)
    held = memory.store._tiers.device.pool.cached
    assert held == (PROMPT_PAGES if later == "other" else 0), "what is too old is freed"
    memory.close()


def test_a_look_up_is_no_use(tmp_path: Path) -> None:
    memory = memory_of(tmp_path, ClassShare(name="batch", ttl_s=10))
    serve(memory, prompt(1), "batch", 100)
    assert [found(memory, prompt(1), now) for now in (105, 109, 110)] == [24, 24, 0]
    memory.close()


def test_what_goes_by_itself_is_not_given_to_the_pool(tmp_path: Path) -> None:
    config = config_of(tmp_path, ClassShare(name="batch", ttl_s=10), pool="mooncake://127.0.0.1:1")
    store = Store(LAYOUT, config, "twin")
    targets = {}
    for number, class_name in enumerate(("batch", "agent")):
        ids = prompt(number)
        turn = Turn(class_name=class_name, now=0)
        lease = store.open(OWNER, store.chain(ids), n_prompt=25, capacity_tokens=25, turn=turn)
        assert isinstance(lease, Lease)
        lease.ready()
        lease.commit(24)
        targets[class_name] = {move.target for move in lease.moves}
        lease.close()
    assert targets == {"batch": set(), "agent": {"pool"}}


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"ttl_s": 0}, "batch: ttl_s"),
        ({"host_bytes": -1}, "batch: host_bytes"),
        ({"name": ""}, "name: 1 to 32 bytes"),
        ({"name": "x" * 33}, "name: 1 to 32 bytes"),
    ],
)
def test_a_share_that_cannot_be_is_named(field: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ClassShare(**{"name": "batch", **field})

"""The host tier's bytes: what was saved comes back, or is dropped and computed again."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forebay.kvstore.config import StoreConfig
from forebay.kvstore.memory import Memory, make_memory
from forebay.kvstore.store import Lease
from tests.kvstore_twin import OWNER, open_lease, pushed_out, serve, tiny_layout

LAYOUT = tiny_layout()


def config(run_dir: Path) -> StoreConfig:
    """Device pages for one prompt, host pages for three."""
    return StoreConfig(
        device_bytes=18 * LAYOUT.page_bytes,
        host_bytes=60 * LAYOUT.page_bytes,
        run_dir=str(run_dir),
        checkpoints="prompt_end",
    )


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Memory]:
    memory = make_memory(LAYOUT, config(tmp_path), "twin")
    yield memory
    memory.store.check()
    memory.close()


def test_a_hit_in_the_host_comes_back(memory: Memory) -> None:
    ids = pushed_out(memory, "host")
    assert serve(memory, [*ids, 1]) == (28, None)
    stats = memory.store.stats()
    assert stats.hit_tokens == {"host": 28}
    # Two layers of 28 rows and of 28 index keys, and four states: a chain goes as a whole.
    assert stats.restored_bytes == {"host": 2 * 28 * 8 + 2 * 28 * 4 + 4 * 90}
    assert stats.evicted_pages["device", "saved"] == 6 + 4 + 4


@pytest.mark.parametrize("device_pages", range(18, 60, 6))
def test_sessions_take_turns_on_a_device_too_small_for_them(tmp_path: Path, device_pages: int) -> None:
    """Every turn evicts others' pages and copies into them: what was evicted was saved before it was overwritten."""
    memory = make_memory(LAYOUT, replace(config(tmp_path), device_bytes=device_pages * LAYOUT.page_bytes), "twin")
    sessions = [[session] * 14 for session in range(3)]
    for turn in range(24):
        ids = sessions[turn % 3]
        serve(memory, ids)
        if turn % 2:
            serve(memory, [*ids, 9, 9])
        ids += [turn % 7] * (turn % 4)
        memory.store.check()
    assert memory.store.stats().evicted_pages["device", "saved"] > 0 or device_pages > 40
    memory.close()


def test_pages_to_grow_into_are_saved_first(memory: Memory) -> None:
    ids = list(range(30))
    serve(memory, ids)
    lease = memory.open(OWNER, None, n_prompt=1, capacity_tokens=1)
    assert isinstance(lease, Lease)
    with lease:
        assert memory.grow(lease, 48) is None
        memory.store.check()
        memory.pool.bytes[lease.pages["latent"].flatten().tolist()] = 255
    assert memory.store.stats().evicted_pages["device", "saved"] >= 12
    assert serve(memory, ids)[0] == 28


def test_what_leaves_the_device_does_not_leave_the_host_at_once(tmp_path: Path) -> None:
    """Rows that lie in both tiers need no save when the device needs room: then their host copy is the only one."""
    sizes = {"device_bytes": 40 * LAYOUT.page_bytes, "host_bytes": 14 * LAYOUT.page_bytes}
    memory = make_memory(LAYOUT, replace(config(tmp_path), **sizes), "twin")
    ids, everything = list(range(30)), [9] * 133
    serve(memory, ids)
    open_lease(memory, everything).close()
    assert serve(memory, ids)[0] == 28
    open_lease(memory, everything).close()
    assert memory.store.lookup(memory.store.chain(ids), 30).run_tokens == 28
    memory.close()


def test_restored_rows_are_shared_again(memory: Memory) -> None:
    ids = pushed_out(memory, "host")
    with open_lease(memory, [*ids, 1]) as lease:
        assert lease.hit_tokens == 28
        found = memory.store.lookup(memory.store.chain(ids), 30)
        assert found.tier_tokens == {"device": 28}
        assert found.state_tier == "host", "a state is copied into the request's own, no more"


def test_every_flipped_byte_is_a_miss_and_never_wrong_bytes(tmp_path: Path) -> None:
    """One bit anywhere in the host tier: in what was saved, it is found in time; in padding, it is harmless."""
    for number, at in itertools.product(range(12), range(0, 96, 13)):
        memory = make_memory(LAYOUT, config(tmp_path), "twin")
        ids = pushed_out(memory, "host")
        assert memory.host is not None
        page = np.flatnonzero(memory.host._entry >= 0)[number]
        saved = at < memory.host.directory.table.entries["n_bytes"][memory.host._entry[page]]
        memory.host.granule(page)[at] ^= 16
        assert serve(memory, [*ids, 1]) == ((0, "corrupt") if saved else (28, None))
        memory.store.check()
        memory.close()


def test_a_wrong_state_takes_its_siblings_along(memory: Memory) -> None:
    ids = pushed_out(memory, "host")
    tiers = memory.store._tiers
    chain = memory.store.chain(ids)
    page = tiers.host.checkpoints[chain.keys[6]].pages[-1]
    assert memory.host is not None
    memory.host.granule(page)[0] ^= 1
    with open_lease(memory, ids) as lease:
        assert (lease.hit_tokens, lease.hit.run_tokens, lease.hit.miss) == (0, 28, "corrupt")
        assert chain.keys[6] not in tiers.host.checkpoints
    assert memory.store.stats().evicted_pages["host", "corrupt"] == 4


def test_a_checkpoint_that_lost_a_part_is_found_by_no_worker_and_on_no_disk(tmp_path: Path) -> None:
    """Its other parts still lie in the arena that workers share, and would go to the SSD with the next eviction."""
    on_disk = replace(config(tmp_path), ssd_path=str(tmp_path / "ssd"), ssd_bytes=1 << 22)
    memory, other = make_memory(LAYOUT, on_disk, "twin"), make_memory(LAYOUT, config(tmp_path), "twin")
    ids = pushed_out(memory, "host")
    chain = memory.store.chain(ids)
    assert other.lookup(other.store.chain(ids), 30).tokens == 28
    memory.store.drop_checkpoint(chain.keys[6])
    memory.settle()
    found = other.lookup(other.store.chain(ids), 30)
    assert (found.tokens, found.run_tokens, found.miss) == (0, 28, "evicted")
    for first in range(1, 9):
        serve(memory, [first] * 40)
    found = memory.lookup(chain, 30)
    assert (found.tokens, found.run_tokens, found.miss) == (0, 28, "sibling_missing"), "the rows are on the SSD"
    other.close()
    memory.close()


def test_wrong_rows_cut_the_hit_and_spare_the_rest(memory: Memory) -> None:
    ids = pushed_out(memory, "host")
    chain = memory.store.chain(ids)
    span = memory.store._tiers.host.span("latent", chain.keys[5])
    assert span is not None
    assert memory.host is not None
    memory.host.granule(span.pages[0])[5] ^= 1
    with open_lease(memory, ids) as lease:
        assert (lease.hit_tokens, lease.hit.run_tokens, lease.hit.miss) == (0, 12, "corrupt")


def test_written_through_rows_and_states_survive_in_the_host(tmp_path: Path) -> None:
    """Everything up to the checkpoint lies in both tiers as soon as it is kept."""
    roomy = replace(config(tmp_path), device_bytes=60 * LAYOUT.page_bytes, write="write_through")
    memory = make_memory(LAYOUT, roomy, "twin")
    ids = list(range(30))
    serve(memory, ids)
    host = memory.store._tiers.host
    chain = memory.store.chain(ids)
    assert chain.keys[6] in host.checkpoints
    assert all(host.span(group.name, key) for group in LAYOUT.paged for key in chain.keys[:7])
    memory.close()


def test_no_host_tier_no_file(tmp_path: Path) -> None:
    memory = make_memory(LAYOUT, replace(config(tmp_path), host_bytes=0), "twin")
    serve(memory, list(range(30)))
    serve(memory, [9] * 40)
    assert list(tmp_path.iterdir()) == []
    assert memory.store.stats().evicted_pages.keys() == {("device", "dropped")}


def test_a_host_full_of_the_smallest_units_takes_new_ones(tmp_path: Path) -> None:
    """Then every entry is taken, and not only every page."""
    changes = {"write": "write_through", "checkpoints": "interval:1000", "host_bytes": 20 * LAYOUT.page_bytes}
    memory = make_memory(LAYOUT, replace(config(tmp_path), **changes), "twin")  # type: ignore[arg-type]
    for first in range(12):
        ids = [first] * 12
        serve(memory, ids)
        key = memory.store.chain(ids).keys[-1]
        memory.settle()
        assert memory.store._tiers.host.span("latent", key) is not None, f"prompt {first}"
    memory.close()

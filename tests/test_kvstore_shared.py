"""One host tier for all workers of a node: what one stored another restores, ranks store rows once, deaths leave what
was finished."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from forebay.kvstore import shared_file
from forebay.kvstore.arena import ArenaError
from forebay.kvstore.checksum import checksum
from forebay.kvstore.config import StoreConfig
from forebay.kvstore.device import DevicePool
from forebay.kvstore.memory import Memory, make_memory
from forebay.kvstore.moves import Label, Move
from forebay.kvstore.shared_entries import Entries, Place
from forebay.kvstore.shared_file import SharedFile
from forebay.kvstore.shared_table import FREE, READY, WRITING, geometry_of
from forebay.kvstore.store import Lease
from tests.kvstore_twin import OWNER, open_lease, serve, tiny_layout
from tests.shared_workers import Node, shared_files

LAYOUT = tiny_layout()
IDS = list(range(30))


def config(run_dir: Path, **changes: object) -> StoreConfig:
    sizes = {"device_bytes": 20 * LAYOUT.page_bytes, "host_bytes": 60 * LAYOUT.page_bytes, "checkpoints": "prompt_end"}
    return StoreConfig(run_dir=str(run_dir), **{**sizes, **changes})  # type: ignore[arg-type]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(LAYOUT, config(tmp_path))
    yield made
    files = shared_files(tmp_path)
    assert files == [] or not made.living


def used_bytes(memory: Memory) -> dict[str, int]:
    """Bytes that hold something, by group."""
    assert memory.host is not None
    table = memory.host.directory.table
    held: dict[str, int] = {}
    for entry in np.flatnonzero(table.state == READY).tolist():
        row = table.entries[entry]
        name = row["group"].decode()
        held[name] = held.get(name, 0) + int(row["n_pages"]) * int(row["n_bytes"])
    return held


def close(*memories: Memory) -> None:
    for memory in memories:
        memory.store.check()
        assert memory.host is not None
        memory.host.directory.check()
        memory.close()


def pushed_down(memory: Memory, ids: list[int] = IDS) -> None:
    """Out of a device that holds one prompt, with all that others need of it."""
    serve(memory, ids)
    open_lease(memory, [9] * 60).close()


def test_what_one_worker_stored_another_restores(node: Node) -> None:
    one, other = node.worker(), node.worker()
    pushed_down(one)
    assert other.lookup(other.store.chain(IDS), 30).tier_tokens == {"host": 28}
    assert serve(other, [*IDS, 1]) == (28, None)
    assert other.store.stats().hit_tokens == {"host": 28}
    close(one, other)


def test_what_was_evicted_is_no_hit_for_anybody(node: Node) -> None:
    one, other = node.worker(), node.worker()
    pushed_down(one)
    assert other.lookup(other.store.chain(IDS), 30).tokens == 28
    for prompt in range(12):
        serve(one, [50 + prompt] * 30)
    assert other.lookup(other.store.chain(IDS), 30).tokens == 0
    assert serve(other, IDS) == (0, "evicted")
    close(one, other)


def test_a_view_that_is_behind_costs_a_retry_and_never_a_wrong_byte(node: Node) -> None:
    one, other = node.worker(), node.worker()
    pushed_down(one)
    chain = other.store.chain(IDS)
    assert other.lookup(chain, 30).tokens == 28
    lease = other.store.open(OWNER, chain, n_prompt=30, capacity_tokens=30)
    assert isinstance(lease, Lease)
    for prompt in range(12):
        serve(one, [50 + prompt] * 30)
    assert other.carry_out(lease.moves) is not None
    lease.close()
    assert serve(other, IDS) == (0, "evicted")
    close(one, other)


def test_an_entry_that_holds_another_unit_by_now_is_not_read(node: Node) -> None:
    """Of the same shape and with a right checksum: only its serial tells it from the one that the view means."""
    one, other = node.worker(), node.worker()
    pushed_down(one)
    chain = other.store.chain(IDS)
    assert other.lookup(chain, 30).tokens == 28
    span = other.store._tiers.host.span("latent", chain.keys[2])
    assert span is not None
    up = Move(source="host", source_pages=span.pages, target="device", target_pages=span.pages[:0], n_bytes=96)
    up = replace(up, target_pages=np.arange(len(span.pages), dtype=np.int32))
    assert one.host is not None
    assert other.host is not None
    table = one.host.directory.table
    entry = int(other.host._entry[span.pages[0]])
    for each in np.flatnonzero(table.state == READY).tolist():
        one.host.directory.discard(each, int(table.serial[each]))
    shape = replace(
        one.host.directory.entries.stored(entry).unit,
        label=Label(group="latent", keys=(b"k" * 32,), before=None, start_tokens=0, end_tokens=12),
    )
    while place := one.host.directory.put(
        replace(shape, label=replace(shape.label, keys=(os.urandom(32),))), spill=False
    ):
        assert isinstance(place, Place)
        one.host.directory.publish(place, [checksum(table.granules[page, :96]) for page in place.granules])
        if place.entry == entry:
            break
    with other.host.reading([up]):
        assert other.host.restore(other.pool, up) == span.pages.tolist()
    close(one, other)


def test_ranks_store_the_rows_they_share_once(tmp_path: Path) -> None:
    """Both ranks of a pair compute the same prompt: the rows lie there once, each one's states beside."""
    written = config(tmp_path, write="write_through", device_bytes=60 * LAYOUT.page_bytes)
    node = Node(LAYOUT, written)
    first, second = node.worker(rank=0, ranks=2), node.worker(rank=1, ranks=2)
    serve(first, IDS)
    of_one = used_bytes(first)
    serve(second, IDS)
    of_both = used_bytes(second)
    rows = {"latent": 2 * 28 * 8, "index": 2 * 28 * 4}
    states = 4 * 90
    print(f"\none rank: {of_one}, sum {sum(of_one.values())}; two ranks: {of_both}, sum {sum(of_both.values())}")
    assert of_one == {**rows, "states 0 of 2": states}
    assert of_both == {**rows, "states 0 of 2": states, "states 1 of 2": states}
    close(first, second)


def test_a_rank_restores_its_own_states_and_the_others_rows(tmp_path: Path) -> None:
    node = Node(LAYOUT, config(tmp_path))
    first, second = node.worker(rank=0, ranks=2), node.worker(rank=1, ranks=2)
    pushed_down(first)
    found = second.lookup(second.store.chain(IDS), 30)
    assert (found.tokens, found.run_tokens, found.miss) == (0, 28, "no_checkpoint")
    close(first, second)


def test_other_models_live_side_by_side(tmp_path: Path) -> None:
    ours, theirs = (Node(LAYOUT, config(tmp_path), name) for name in ("ours", "theirs"))
    one = ours.worker()
    theirs.is_alive = ours.is_alive = lambda pid, started: True  # type: ignore[method-assign]
    other = theirs.worker()
    pushed_down(one)
    pushed_down(other)
    assert serve(one, [*IDS, 1])[0] == 28
    assert serve(other, [*IDS, 1])[0] == 28
    close(one, other)


def test_the_death_of_a_worker_leaves_what_it_finished(node: Node) -> None:
    """Killed in mid-put with a pin on what it read: both are gone with it, and all else can be restored."""
    one, other = node.worker(), node.worker()
    pushed_down(one)
    assert one.host is not None
    assert other.host is not None
    table = other.host.directory.table
    ready = np.flatnonzero(table.state == READY)
    one.host.directory.pin(ready[:1], table.serial[ready[:1]])
    fresh = replace(one.host.directory.entries.stored(int(ready[0])).unit, model=b"x" * 32)
    assert one.host.directory.put(fresh, spill=False) is not None
    assert (table.state == WRITING).any()
    node.kill(one)
    replacement = node.worker()
    assert not (table.state == WRITING).any()
    assert not table.readers.any()
    assert serve(replacement, [*IDS, 1]) == (28, None)
    close(other, replacement)


@pytest.mark.parametrize("lines", range(1, 260, 7))
def test_killed_after_any_line_of_a_put(tmp_path: Path, lines: int) -> None:
    node = Node(LAYOUT, config(tmp_path, write="write_through"))
    one, other = node.worker(), node.worker()
    serve(one, IDS)
    node.killed_in(one, lambda: (serve(one, [3] * 30), None)[1], lines)
    replacement = node.worker()
    for worker in (other, replacement):
        assert worker.host is not None
        worker.host.directory.check()
        assert serve(worker, [*IDS, 1]) == (28, None)
        serve(worker, [3] * 30)
    table = replacement.host.directory.table  # type: ignore[union-attr]
    assert set(table.state.tolist()) <= {FREE, READY}
    close(other, replacement)


def killed_child(act: Callable[[], object]) -> None:
    """A process that is to kill itself within `act`."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL


def test_a_process_killed_in_mid_put_and_another_that_restores_what_was_finished(
    tmp_path: Path,
) -> None:
    """Two processes and SIGKILL: the first dies within its second prompt's copy, in the middle of a page."""

    def work() -> None:
        memory = make_memory(LAYOUT, config(tmp_path), "twin")
        pushed_down(memory)
        take = DevicePool.take

        def half(pool: DevicePool, page: int, into: npt.NDArray[np.uint8]) -> int:
            take(pool, page, into[: len(into) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
            return 0

        DevicePool.take = half  # type: ignore[method-assign]
        pushed_down(memory, [5] * 40)

    killed_child(work)
    memory = make_memory(LAYOUT, config(tmp_path), "twin")
    assert memory.host is not None
    table = memory.host.directory.table
    assert set(table.state.tolist()) == {FREE, READY}
    assert serve(memory, [*IDS, 1]) == (28, None)
    assert memory.store.stats().hit_tokens == {"host": 28}
    close(memory)
    assert shared_files(tmp_path) == []


def test_a_process_killed_with_the_lock_lets_go_of_it(tmp_path: Path) -> None:
    def work() -> None:
        memory = make_memory(LAYOUT, config(tmp_path), "twin")
        pushed_down(memory)
        Entries.place = lambda self, unit, owner: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        pushed_down(memory, [5] * 40)

    killed_child(work)
    memory = make_memory(LAYOUT, config(tmp_path), "twin")
    assert memory.host is not None
    assert memory.host.directory.table.get("rebuilt") == 1, "it was marked, and made anew from the entries"
    assert serve(memory, [*IDS, 1]) == (28, None)
    close(memory)


def test_the_last_to_leave_removes_the_file(node: Node, tmp_path: Path) -> None:
    one, other = node.worker(), node.worker()
    (file,) = shared_files(tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.stat().st_blocks * 512 >= 60 * LAYOUT.page_bytes, "its memory is there from the start"
    one.close()
    assert shared_files(tmp_path) == [file]
    other.close()
    assert shared_files(tmp_path) == []


def test_another_layout_is_refused_while_one_is_in_use_and_made_anew_after(node: Node, tmp_path: Path) -> None:
    one = node.worker()
    wider = Node(tiny_layout(180), config(tmp_path))
    wider.is_alive = node.is_alive  # type: ignore[method-assign]
    with pytest.raises(ArenaError, match=r"in use with .*page_bytes=96.* not .*page_bytes=192"):
        wider.worker()
    with pytest.raises(ArenaError, match="in use with"):
        node.worker(host_bytes=90 * LAYOUT.page_bytes)
    node.kill(one)
    wider.worker().close()


def test_another_format_version_is_one_clear_line(node: Node, tmp_path: Path) -> None:
    one = node.worker()
    assert one.host is not None
    one.host.directory.table.header["version"] = 7
    with pytest.raises(ArenaError, match=r"host-local.shared: not of format version 3: remove it"):
        node.worker()
    one.close()


def test_no_room_is_one_clear_line_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ArenaError, match="no shared arena of"):
        SharedFile(tmp_path, "host", replace(geometry_of(LAYOUT, 1 << 20), n_pages=1 << 42))
    assert not shared_files(tmp_path)


def test_too_many_workers_are_refused(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = [node.worker(device_bytes=20 * LAYOUT.page_bytes) for _ in range(64)]
    with pytest.raises(ArenaError, match="64 workers use it already"):
        node.worker()
    node.kill(workers[0])
    replacement = node.worker()
    close(*workers[1:], replacement)


def test_pages_are_told_by_one_worker_so_that_they_add_up(node: Node) -> None:
    one, other = node.worker(), node.worker()
    pushed_down(one)
    other.settle()
    told = [memory.store.stats().tiers[1] for memory in (one, other)]
    assert [tier.total_pages for tier in told] == [60, 0]
    assert told[0].cached_pages == 60 - told[0].free_pages == 14
    node.kill(one)
    other.settle()
    assert other.store.stats().tiers[1].total_pages == 60
    close(other)


def test_a_lock_that_hangs_costs_the_tier_and_no_more(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_file, "LOCK_S", 0.01)
    monkeypatch.setattr(shared_file, "RETRY_S", 0.0)
    one, other = node.worker(), node.worker()
    pushed_down(one)
    assert other.lookup(other.store.chain(IDS), 30).tokens == 28
    assert one.host is not None
    assert one.host.directory._file.lock()
    assert serve(other, IDS)[0] == 0
    one.host.directory._file.unlock()
    assert os.path.exists(one.host.directory._file.path)
    close(one, other)

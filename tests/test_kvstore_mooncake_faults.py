"""What dies around the cluster-wide pool costs hits for a while, never a request and never a byte. Figures with -s."""

import os
import signal
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from mooncake_rig import config, flush, large_layout, memory_of, needs_mooncake, pool_of, process, shared, wait_until

from forebay.kvstore import pool_master
from forebay.kvstore.lookup import STATES
from forebay.kvstore.memory import Memory
from forebay.kvstore.moves import Label
from forebay.kvstore.pool_master import KeptMaster
from forebay.kvstore.pool_object import object_of
from forebay.kvstore.ssd import model_mark
from tests.kvstore_twin import serve

needs_mooncake()
LAYOUT = large_layout()
SESSIONS = 12
KILLS = 1


@pytest.fixture
def master() -> Iterator[KeptMaster]:
    with KeptMaster() as master:
        yield master


def session(number: int) -> list[int]:
    return [number, *range(27)]


def load(memory: Memory, rounds: int = 1) -> float:
    """Sessions in turn, on a device that holds one of them: the share of them that hit. Every byte is looked at."""
    hits = []
    for number in [*range(SESSIONS)] * rounds:
        hits.append(serve(memory, session(number))[0] > 0)
        flush(memory)  # a model would take its time
    return sum(hits) / len(hits)


def test_a_master_that_dies_under_load_costs_hits_for_a_while(tmp_path: Path, master: KeptMaster) -> None:
    with (
        shared(tmp_path, master, LAYOUT),
        memory_of(LAYOUT, config(tmp_path, master, LAYOUT, pool_ask_s=0.05), "dies") as memory,
    ):
        load(memory)
        before, pid = load(memory, 3), master.pid
        assert pid is not None
        numbers, during, away_s, started = count(), [], 0.0, time.monotonic()
        os.kill(pid, signal.SIGKILL)
        while time.monotonic() - started < 60 and sum(during[-SESSIONS:]) < SESSIONS:
            asked = time.monotonic()
            during.append(serve(memory, session(next(numbers) % SESSIONS))[0] > 0)
            away_s = max(away_s, time.monotonic() - asked)
            time.sleep(0.01)
        recovered_s = time.monotonic() - started
        after = load(memory, 3)
        events = memory.store.stats().pool_events
    print(
        f"\nmaster killed under load: {before:.0%} hits before, {sum(during)} of {len(during)} meanwhile, "
        f"{after:.0%} after; all sessions hit again {recovered_s:.1f} s after the kill; "
        f"slowest request {away_s * 1e3:.0f} ms; {events}"
    )
    assert (before, after) == (1, 1)
    assert not all(during)
    assert events["unreachable"] > 0
    assert master.restarts == 1


@pytest.mark.soak
def test_a_master_that_hangs_holds_nobody_up(tmp_path: Path, master: KeptMaster) -> None:
    made = config(tmp_path, master, LAYOUT, pool_ask_s=0.05, pool_read_s=0.5)
    with shared(tmp_path, master, LAYOUT), memory_of(LAYOUT, made, "hangs") as memory:
        load(memory)
        before = load(memory)
        assert master.pid is not None
        os.kill(master.pid, signal.SIGSTOP)
        started = time.monotonic()
        hits = [serve(memory, session(number))[0] > 0 for number in range(SESSIONS)]
        slow_s = time.monotonic() - started
        os.kill(master.pid, signal.SIGCONT)
        wait_until(lambda: load(memory) == 1, 20, "no hits again")
    print(f"\nmaster stopped: {before:.0%} hits before, {sum(hits)} of {len(hits)} meanwhile, in {slow_s:.1f} s")
    assert slow_s < SESSIONS * 1.2


def test_a_worker_killed_while_it_writes_harms_nobody(tmp_path: Path, master: KeptMaster) -> None:
    with shared(tmp_path, master, LAYOUT), memory_of(LAYOUT, config(tmp_path, master, LAYOUT), "killed") as memory:
        load(memory)
        before, during = load(memory), []
        for _ in range(KILLS):
            with process(master, "write", str(16 << 20), "killed") as writer:
                during.append(load(memory))
                time.sleep(0.1)
                writer.kill()
                during.append(load(memory))
        waited_s = wait_until(lambda: load(memory) == 1, 30, "hits do not come back")
        theirs = [serve(memory, [turn, *range(30)])[0] > 0 for turn in range(97)]
        events = memory.store.stats().pool_events
    print(
        f"\n{KILLS} writers killed: {before:.0%} hits before, {[f'{rate:.0%}' for rate in during]} meanwhile, "
        f"100% again after {waited_s:.1f} s; of the prompts that they served, {sum(theirs)} of 97 hit; {events}"
    )
    assert before == 1


def test_what_a_client_died_putting_is_put_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the middle of one long put. Until the master gives the name up, a put of it answers 0 and is lost."""
    monkeypatch.setattr(pool_master, "WRITE_TTL_S", 4)
    large = {"pool_segment_bytes": 600 << 20}
    with (
        KeptMaster() as master,
        shared(tmp_path, master, LAYOUT, **large),
        memory_of(LAYOUT, config(tmp_path, master, LAYOUT), "mid-put") as memory,
    ):
        key = memory.store.chain(session(0)).keys[5]
        label = Label(group=STATES, keys=(key,), before=None, start_tokens=0, end_tokens=24)
        name = object_of(LAYOUT, model_mark("mid-put"), label).name
        with process(master, "put", str(400 << 20), name) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "putting\n"
            time.sleep(0.05)
            writer.kill()
            assert writer.stdout.read() == "", "it was not done"
        started = time.monotonic()
        serve(memory, session(0)[:25])
        flush(memory)
        events = memory.store.stats().pool_events
        assert events == {"failed": 1}, "an answer of 0 is not believed"

        def found_by_another() -> bool:
            serve(memory, session(7))
            serve(memory, session(0)[:25])
            flush(memory)
            with memory_of(LAYOUT, config(tmp_path, master, LAYOUT), "mid-put") as other:
                return serve(other, session(0)[:25])[0] == 24

        wait_until(found_by_another, 20, "it is never put")
    print(f"\nclient killed in mid-put: {events}; put by another after {time.monotonic() - started:.1f} s")


def test_a_full_pool_drops_the_oldest_and_goes_on(tmp_path: Path, master: KeptMaster) -> None:
    made = config(tmp_path, master, LAYOUT, pool_segment_bytes=16 << 20, pool_pin_s=0.0, pool_queue_bytes=8 << 20)
    with shared(tmp_path, master, LAYOUT, pool_segment_bytes=16 << 20), memory_of(LAYOUT, made, "full") as memory:
        for number in range(100, 200):
            serve(memory, session(number))
            flush(memory)
        events = memory.store.stats().pool_events
        waited_s = wait_until(lambda: load(memory) == 1, 40, "a working set that fits does not hit")
    print(f"\n{100 * 4 * 65536 >> 20} MiB into 16 MiB: {events}; a set that fits hits 100% after {waited_s:.1f} s")
    assert events["full"] > 0


def test_with_two_copies_a_dead_holder_costs_no_hit(tmp_path: Path, master: KeptMaster) -> None:
    two = {"pool_segment_bytes": 0, "pool_copies": 2}
    with (
        process(master, "hold", str(64 << 20)) as holder,
        process(master, "hold", str(64 << 20)),
        shared(tmp_path, master, LAYOUT, **two),
        memory_of(LAYOUT, config(tmp_path, master, LAYOUT, **two), "copies") as memory,
    ):
        load(memory)
        before = load(memory)
        holder.kill()
        started = time.monotonic()
        after = load(memory, 3)
        taken_s = time.monotonic() - started
        assert not pool_of(memory).traffic._absent
    print(f"\n2 copies, one holder killed: {before:.0%} hits before, {after:.0%} after, 3 rounds in {taken_s:.1f} s")
    assert (before, after) == (1, 1)


@pytest.mark.soak
def test_what_memory_has_no_room_for_comes_back_from_the_disk(tmp_path: Path) -> None:
    more = {"pool_segment_bytes": 16 << 20, "pool_pin_s": 0.0, "pool_ssd_path": str(tmp_path / "ssd")}
    sessions = range(100, 180)
    with KeptMaster(offload=True) as master, shared(tmp_path, master, LAYOUT, **more):
        with memory_of(LAYOUT, config(tmp_path, master, LAYOUT, **more), "disk") as memory:
            for number in sessions:
                serve(memory, session(number))
                flush(memory)
                time.sleep(0.04)  # its own thread takes a heartbeat of a second
            time.sleep(1)
            hits = sum(serve(memory, session(number))[0] > 0 for number in sessions)
        files = [path for path in (tmp_path / "ssd").rglob("*") if path.is_file()]
        print(
            f"\n{len(sessions) * 4 * 65536 >> 20} MiB into 16 MiB above a disk: {hits} of {len(sessions)} sessions hit"
        )
        assert hits > 64, "more than there is memory for"
        assert files
    assert not [path for path in (tmp_path / "ssd").rglob("*") if path.is_file()], "its files go with it"

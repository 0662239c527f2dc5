"""The SSD tier below memory: what went down comes up, also after a restart; what is wrong is a miss."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forebay.kvstore.config import StoreConfig
from forebay.kvstore.log_folder import LogBusy, LogFolder, file_of, numbers
from forebay.kvstore.memory import Memory, make_memory
from tests.kvstore_twin import OWNER, open_lease, pushed_out, serve, tiny_layout

LAYOUT = tiny_layout()


def config(folder: Path, **changes: object) -> StoreConfig:
    """Device pages for one prompt, no host, a disk for many."""
    made = StoreConfig(
        device_bytes=18 * LAYOUT.page_bytes,
        run_dir=str(folder / "run"),
        checkpoints="prompt_end",
        ssd_path=str(folder / "ssd"),
        ssd_queue_bytes=1 << 20,
        ssd_bytes=8 << 20,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


@contextmanager
def memory_of(config: StoreConfig, fingerprint: str = "twin") -> Iterator[Memory]:
    memory = make_memory(LAYOUT, config, fingerprint)
    try:
        yield memory
        memory.store.check()
    finally:
        memory.close()


def flush(memory: Memory) -> None:
    assert memory.ssd is not None
    assert memory.ssd.log.flush(30)


def test_a_hit_on_the_ssd_comes_back(tmp_path: Path) -> None:
    with memory_of(config(tmp_path)) as memory:
        ids = pushed_out(memory, "ssd")
        flush(memory)
        assert serve(memory, [*ids, 1]) == (28, None)
        stats = memory.store.stats()
        assert stats.hit_tokens == {"ssd": 28}
        assert stats.restored_bytes == {"ssd": 2 * 28 * 8 + 2 * 28 * 4 + 4 * 90}


def test_what_is_still_on_its_way_down_is_a_hit_too(tmp_path: Path) -> None:
    with memory_of(config(tmp_path)) as memory:
        assert memory.ssd is not None
        memory.ssd.log._writer._write = lambda group: __import__("time").sleep(0.5)  # type: ignore[method-assign]
        ids = pushed_out(memory, "ssd")
        assert serve(memory, [*ids, 1]) == (28, None)


def test_it_is_hit_after_a_restart(tmp_path: Path) -> None:
    written = config(tmp_path, ssd_write="write_through")
    with memory_of(written) as memory:
        ids = pushed_out(memory, "ssd")
    for turn in range(3):
        with memory_of(written) as memory:
            assert memory.store.stats().ssd_events == {}
            assert serve(memory, [*ids, turn]) == (28, None)
            assert memory.store.stats().hit_tokens == {"ssd": 28}


def test_a_session_goes_down_and_up_again_turn_after_turn(tmp_path: Path) -> None:
    """Sessions that take turns on a device too small for them, above a host too small for them, above the SSD."""
    small = config(tmp_path, host_bytes=22 * LAYOUT.page_bytes)
    with memory_of(small) as memory:
        sessions = [[session] * 14 for session in range(6)]
        for turn in range(48):
            ids = sessions[turn % 6]
            hit, _ = serve(memory, ids)
            assert hit == (0 if turn < 6 else hit)
            ids += [turn % 7] * (turn % 4)
            memory.store.check()
        hits = memory.store.stats().hit_tokens
        assert min(hits["ssd"], hits["host"]) > 0
        assert memory.store.stats().misses.keys().isdisjoint({"evicted", "corrupt"}), "everything is still somewhere"


@pytest.mark.parametrize(("policy", "held"), [("write_back", False), ("write_through", True), ("selective", False)])
def test_when_it_is_written(tmp_path: Path, policy: str, held: bool) -> None:
    roomy = config(tmp_path, device_bytes=200 * LAYOUT.page_bytes, ssd_write=policy)
    with memory_of(roomy) as memory:
        ids = list(range(30))
        serve(memory, ids)
        chain = memory.store.chain(ids)
        ssd = memory.store._tiers.ssd
        assert (chain.keys[6] in ssd.checkpoints) is held
        assert all(bool(ssd.span(group.name, key)) is held for group in LAYOUT.paged for key in chain.keys[:7])
        serve(memory, ids)
        assert (chain.keys[6] in ssd.checkpoints) is (held or policy == "selective")
        assert bool(ssd.span("latent", chain.keys[2])) is (held or policy == "selective")


def test_selective_keeps_what_was_used_twice_and_lets_the_rest_go(tmp_path: Path) -> None:
    with memory_of(config(tmp_path, ssd_write="selective", device_bytes=32 * LAYOUT.page_bytes)) as memory:
        used, once = [1] * 30, [2] * 30
        serve(memory, used)
        serve(memory, used)
        serve(memory, once)
        open_lease(memory, [9] * 90).close()
        assert (serve(memory, used)[0], serve(memory, once)[0]) == (28, 0)


@pytest.mark.parametrize("flipped", [False, True])
def test_wrong_bytes_in_the_host_do_not_go_down_with_a_right_checksum(tmp_path: Path, flipped: bool) -> None:
    with memory_of(config(tmp_path, host_bytes=24 * LAYOUT.page_bytes)) as memory:
        ids = list(range(30))
        serve(memory, ids)
        serve(memory, [9] * 30)
        assert memory.host is not None
        if flipped:
            memory.host.directory.table.granules[:, 0] ^= 1
        for other in range(4):
            serve(memory, [other] * 30)
        assert memory.store.lookup(memory.store.chain(ids), 30).state_tier == (None if flipped else "ssd")
        assert serve(memory, ids)[0] == (0 if flipped else 28)


def records(folder: Path) -> list[Path]:
    return [file_of(slot, number) for slot in sorted((folder / "ssd").iterdir()) for number in numbers(slot)]


@contextmanager
def written(folder: Path, **changes: object) -> Iterator[tuple[StoreConfig, list[int], bytes]]:
    """A log with one prompt in one segment, and that segment's bytes."""
    through = config(folder, ssd_write="write_through", **changes)
    with memory_of(through) as memory:
        ids = list(range(30))
        serve(memory, ids)
    (segment,) = records(folder)
    yield through, ids, segment.read_bytes()


def damage(folder: Path, image: bytes) -> None:
    for old in records(folder):
        old.unlink()
    file_of(folder / "ssd" / "slot-00", 0).write_bytes(image)


def test_a_bit_flipped_anywhere_is_a_miss_and_never_wrong_bytes(tmp_path: Path) -> None:
    """Where the disk changes it between two runs, and where it does under a running one."""
    with written(tmp_path) as (config, ids, image):
        spots = np.flatnonzero(np.frombuffer(image, np.uint8))
        hits = []
        for at in spots[:: len(spots) // 40].tolist():
            damage(tmp_path, image[:at] + bytes([image[at] ^ 4]) + image[at + 1 :])
            with memory_of(config) as memory:
                hits.append(serve(memory, ids)[0])
                events = memory.store.stats().ssd_events
                assert hits[-1] == 28 or sum(events.values()) == 1
            damage(tmp_path, image)
            with memory_of(config) as memory:
                segment = records(tmp_path)[0]
                segment.write_bytes(image[:at] + bytes([image[at] ^ 4]) + image[at + 1 :])
                hit, miss = serve(memory, ids)
                assert (hit, miss) in ((28, None), (12, "corrupt"), (0, "corrupt"))
        assert 0 in hits


def test_one_wrong_state_takes_its_siblings_along_in_every_tier(tmp_path: Path) -> None:
    with written(tmp_path, device_bytes=60 * LAYOUT.page_bytes) as (config, ids, _), memory_of(config) as memory:
        serve(memory, [*ids, 1])
        chain = memory.store.chain(ids)
        assert memory.ssd is not None
        kept = memory.store._tiers.ssd.checkpoints[chain.keys[6]]
        place = memory.ssd._rows[int(kept.pages[-1])].place
        at = place.offset + place.n_bytes - 1
        segment = records(tmp_path)[0]
        image = bytearray(segment.read_bytes())
        image[at] ^= 1
        segment.write_bytes(image)
        with open_lease(memory, [*ids[:29], 77, 77]) as lease:
            assert (lease.hit_tokens, lease.hit.run_tokens, lease.hit.miss) == (0, 28, "corrupt")
        assert all(chain.keys[6] not in tier.checkpoints for tier in memory.store._tiers.order)
        assert memory.store.stats().evicted_pages["ssd", "corrupt"] == 4


@pytest.mark.parametrize("group", range(2))
def test_a_checkpoint_that_lacks_one_group_is_none_after_a_restart(tmp_path: Path, group: int) -> None:
    with written(tmp_path) as (config, ids, _):
        with memory_of(config) as memory:
            assert memory.ssd is not None
            kept = memory.store._tiers.ssd.checkpoints[memory.store.chain(ids).keys[6]]
            place = memory.ssd._rows[int(kept.pages[2 * group])].place
        with open(records(tmp_path)[0], "r+b") as file:
            file.seek(place.offset)
            file.write(bytes(8))
        with memory_of(config) as memory:
            found = memory.store.lookup(memory.store.chain(ids), 30)
            assert (found.tokens, found.run_tokens) == (0, 28)
            assert memory.store.stats().tiers[2].checkpoints == 0


def test_a_deleted_segment_is_a_miss(tmp_path: Path) -> None:
    with written(tmp_path) as (config, ids, _), memory_of(config) as memory:
        records(tmp_path)[0].unlink()
        assert serve(memory, ids) == (0, "corrupt")
        assert memory.ssd_failure is None
        serve(memory, [9] * 40)
        assert serve(memory, ids)[0] == 28


def test_other_models_are_never_found_and_do_not_get_lost(tmp_path: Path) -> None:
    with written(tmp_path) as (config, ids, _):
        with memory_of(config, "other weights") as memory:
            assert memory.store.stats().tiers[2].cached_pages == 0
            assert serve(memory, ids) == (0, "never_stored")
        with memory_of(config) as memory:
            assert serve(memory, ids)[0] == 28


def test_another_format_version_is_set_aside(tmp_path: Path) -> None:
    with written(tmp_path) as (config, ids, image):
        damage(tmp_path, image[:4] + b"\7" + image[5:])
        with memory_of(config) as memory:
            assert serve(memory, ids) == (0, "never_stored")
            assert memory.store.stats().ssd_events["other_version"] == 1


def test_a_second_process_is_refused_in_one_line(tmp_path: Path) -> None:
    with LogFolder(tmp_path / "log"), pytest.raises(LogBusy, match=f"log: in use by process {os.getpid()}$"):
        LogFolder(tmp_path / "log")
    LogFolder(tmp_path / "log").close()


def test_two_workers_of_one_path_have_a_folder_each(tmp_path: Path) -> None:
    with memory_of(config(tmp_path)), memory_of(config(tmp_path)):
        assert sorted(path.name for path in (tmp_path / "ssd").iterdir()) == ["slot-00", "slot-01"]


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    with written(tmp_path):
        for path in (tmp_path / "ssd").rglob("*"):
            assert path.stat().st_mode & 0o077 == 0


def test_the_quota_holds_and_the_oldest_goes(tmp_path: Path) -> None:
    quota = 40 * 4096
    with memory_of(config(tmp_path, ssd_bytes=quota, ssd_write="write_through")) as memory:
        prompts = [[prompt] * 30 for prompt in range(12)]
        for ids in prompts:
            serve(memory, ids)
            flush(memory)
            assert sum(path.stat().st_size for path in records(tmp_path)) <= quota
        serve(memory, [99] * 40)
        flush(memory)
        hits = [memory.store.lookup(memory.store.chain(ids), 30).tokens for ids in prompts]
        assert hits[0] == 0
        assert 28 in hits[6:]
        assert memory.store.stats().ssd_held_bytes <= quota
    with memory_of(config(tmp_path, ssd_bytes=quota // 2)) as memory:
        assert sum(path.stat().st_size for path in records(tmp_path)) <= quota // 2


def test_a_quota_too_small_for_the_model_turns_the_tier_off(tmp_path: Path) -> None:
    with memory_of(config(tmp_path, ssd_bytes=4096)) as memory:
        assert "at least" in (memory.ssd_failure or "")
        assert memory.store.stats().ssd_events == {"failed": 1}
        serve(memory, list(range(30)))


def test_a_folder_that_is_none_turns_the_tier_off(tmp_path: Path) -> None:
    (tmp_path / "ssd").write_text("")
    with memory_of(config(tmp_path, device_bytes=40 * LAYOUT.page_bytes)) as memory:
        assert memory.ssd_failure is not None
        assert "\n" not in memory.ssd_failure
        serve(memory, list(range(30)))
        assert serve(memory, list(range(30)))[0] == 28


def test_a_full_queue_skips_and_counts(tmp_path: Path) -> None:
    with memory_of(config(tmp_path, ssd_queue_bytes=1)) as memory:
        assert memory.ssd is not None
        gate = __import__("threading").Event()
        write = memory.ssd.log._writer._write
        memory.ssd.log._writer._write = lambda group: (gate.wait(30), write(group))  # type: ignore[method-assign]
        for prompt in range(4):
            serve(memory, [prompt] * 30)
        assert memory.store.stats().ssd_events["skipped"] > 5
        memory.store.check()
        gate.set()
        flush(memory)
        assert serve(memory, [0] * 30)[0] == 0


def test_a_disk_that_fails_turns_the_tier_off_and_serving_goes_on(tmp_path: Path) -> None:
    with memory_of(config(tmp_path)) as memory:
        assert memory.ssd is not None
        ids = pushed_out(memory, "ssd")
        flush(memory)

        def broken(group: object) -> None:
            raise OSError(28, "No space left on device")

        memory.ssd.log._writer._write = broken  # type: ignore[method-assign, assignment]
        serve(memory, [8] * 30)
        serve(memory, [7] * 30)
        memory.ssd.log.flush(30)
        serve(memory, [6] * 30)
        assert "No space left" in (memory.ssd_failure or "")
        stats = memory.store.stats()
        assert stats.ssd_events["failed"] == 1
        assert (stats.tiers[2].cached_pages, stats.tiers[2].leased_pages) == (0, 0)
        assert serve(memory, ids)[0] == 0


def test_a_request_given_up_while_its_bytes_come_up_leaves_nothing_pinned(tmp_path: Path) -> None:
    with written(tmp_path) as (config, ids, _), memory_of(config) as memory:
        chain = memory.store.chain(ids)
        for end in ("close", "holder"):
            opening = memory.begin(OWNER, chain, n_prompt=30, capacity_tokens=30)
            memory.store.check()
            if end == "close":
                opening.close()
            else:
                assert memory.store.release_holder(OWNER) == 1
                assert opening.poll() is None
            memory.store.check()
            assert all(tier.leased_pages == 0 for tier in memory.store.stats().tiers)
        assert serve(memory, ids)[0] == 28

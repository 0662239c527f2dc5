"""What a session alone, or a tenant, has stored goes for good: from the device, the host, the SSD and its files."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.cluster.cli import main
from forebay.kvstore import erase
from forebay.kvstore.config import StoreConfig
from forebay.kvstore.erase import purge
from forebay.kvstore.log_care import collect, survey
from forebay.kvstore.log_care import purge as purge_log
from forebay.kvstore.log_folder import file_of, numbers
from forebay.kvstore.memory import Memory, make_memory
from forebay.kvstore.moves import Label, Origin, mark_of
from forebay.kvstore.record import (
    ALIGN_BYTES,
    VERSION,
    Erased,
    OtherVersion,
    Record,
    erased,
    header_bytes,
    pack,
    unpack,
)
from forebay.kvstore.store import Lease
from forebay.kvstore.turn import Turn
from forebay.router.session import digest
from tests.kvstore_twin import OWNER, compute, tiny_layout, verify

LAYOUT = tiny_layout()
SHARED = [7] * 24
"""Two whole pages of rows, one of index keys."""


def config_of(folder: Path, **changes: object) -> StoreConfig:
    config = StoreConfig(
        device_bytes=400 * LAYOUT.page_bytes,
        host_bytes=400 * LAYOUT.page_bytes,
        run_dir=str(folder),
        checkpoints="prompt_end+junction",
        write="write_through",
        ssd_path=str(folder / "ssd"),
        ssd_bytes=1 << 21,
        ssd_queue_bytes=1 << 20,
        ssd_write="write_through",
    )
    return replace(config, **changes)  # type: ignore[arg-type]


@contextmanager
def worker(folder: Path, **changes: object) -> Iterator[Memory]:
    memory = make_memory(LAYOUT, config_of(folder, **changes), "twin")
    assert memory.ssd_failure is None
    try:
        yield memory
    finally:
        memory.store.check()
        memory.close()


def serve(memory: Memory, ids: list[int], session: str, salt: str = "") -> int:
    """One whole turn: its hit."""
    turn = Turn(session=session, class_name="agent", now=0.0)
    chain = memory.store.chain(ids, salt, session)
    lease = memory.open(OWNER, chain, n_prompt=len(ids), capacity_tokens=len(ids), turn=turn)
    assert isinstance(lease, Lease)
    with lease:
        verify(memory, lease, ids, lease.hit_tokens)
        at = lease.hit_tokens
        for end in (*lease.checkpoints, len(ids)):
            compute(memory, lease, ids, at, end)
            memory.commit(lease, end)
            if end in lease.checkpoints:
                memory.checkpoint(lease, end)
            at = end
    return lease.hit_tokens


def found(memory: Memory, ids: list[int], salt: str = "") -> int:
    return memory.lookup(memory.store.chain(ids, salt), len(ids)).tokens


def prompt(session: int, turn: int = 0) -> list[int]:
    return [*SHARED, *[session] * (12 + 12 * turn), 0]


def filled(memory: Memory) -> None:
    """Two sessions of two turns each, one without a prefix in common with them, and one of another tenant."""
    serve(memory, [*SHARED, 0], "first")
    for turn in range(2):
        for session in (1, 2):
            serve(memory, prompt(session, turn), f"s{session}")
    serve(memory, [9] * 37, "s3")
    serve(memory, prompt(1, 1), "s4", "acme")


def image_of(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted((folder / "ssd").glob("*/*.segment")))


@pytest.mark.parametrize("restarts", [False, True])
def test_a_sessions_own_goes_and_what_others_use_stays(tmp_path: Path, restarts: bool) -> None:
    with worker(tmp_path) as memory:
        filled(memory)
        assert memory.purge(session="s1") > 0
        assert memory.purge(session="s1") == 0
        if not restarts:
            checked(memory)
            assert serve(memory, prompt(1, 1), "s1") == 24, "it may come back all the same"
    if restarts:
        with worker(tmp_path, host_bytes=0) as memory:
            checked(memory)


def checked(memory: Memory) -> None:
    assert [found(memory, prompt(1, turn)) for turn in (0, 1)] == [24, 24]
    assert [found(memory, prompt(2, turn)) for turn in (0, 1)] == [36, 48]
    assert (found(memory, [9] * 37), found(memory, prompt(1, 1), "acme")) == (36, 48)


@pytest.mark.parametrize("host", [False, True])
def test_what_was_one_sessions_is_known_to_be_shared_below_too(tmp_path: Path, host: bool) -> None:
    """It was written down when one session alone had used it, and used by others from the device since."""
    with worker(tmp_path) as memory:
        filled(memory)
        if host:
            assert memory.host is not None
            memory.host.directory.purge(mark_of("first"), None)
            memory.settle()
            assert memory.store._tiers.host.checkpoints.keys() >= set(memory.store.chain(SHARED).keys[-1:])
    purge_log(tmp_path / "ssd" / "slot-00", session=mark_of("first"))
    with worker(tmp_path, host_bytes=0) as memory:
        checked_shared(memory)


def checked_shared(memory: Memory) -> None:
    assert [found(memory, prompt(session, 1)) for session in (1, 2)] == [48, 48]
    assert found(memory, [*SHARED, 1]) == 24


def test_a_tenants_goes_whole(tmp_path: Path) -> None:
    with worker(tmp_path) as memory:
        filled(memory)
        memory.purge(salt="acme")
        assert (found(memory, prompt(1, 1), "acme"), found(memory, prompt(1, 1))) == (0, 48)
        assert memory.ssd is not None
        assert memory.ssd.log.flush(10)
        assert not any(b.origin.tenant == mark_of("acme") for b in memory.store._tiers.ssd.units)
    kept = [each.record.label.origin for log in survey(tmp_path / "ssd" / "slot-00", verify=True) for each in log.found]
    assert {origin.tenant for origin in kept} == {mark_of("")}


def test_the_bytes_are_gone_from_the_files_and_their_room_with_them(tmp_path: Path) -> None:
    ids = [*range(50, 87)]
    with worker(tmp_path) as memory:
        filled(memory)
        serve(memory, ids, "secret")
        key = memory.store.chain(ids).keys[-1]
        assert memory.ssd is not None
        assert memory.ssd.log.flush(10)
        before, held = image_of(tmp_path), on_disk(tmp_path)
        assert key in before
        memory.purge(session="secret")
        assert memory.ssd.log.flush(10)
        assert key not in image_of(tmp_path)
        assert mark_of("secret") not in image_of(tmp_path)
        assert on_disk(tmp_path) <= held
    log = tmp_path / "ssd" / "slot-00"
    holes = [hole for each in survey(log, verify=True) for hole in each.holes]
    assert holes
    assert not any(each.damage for each in survey(log, verify=True))
    whole = {hole.segment: file_of(log, hole.segment).read_bytes() for hole in holes}
    assert not any(any(whole[hole.segment][hole.start + 64 : hole.end]) for hole in holes)
    assert collect(log).freed_bytes >= sum(hole.end - hole.start for hole in holes)
    assert not any(each.holes for each in survey(log, verify=True))


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_blocks for path in (folder / "ssd").glob("*/*.segment"))


def test_what_a_request_reads_goes_when_it_ends(tmp_path: Path) -> None:
    with worker(tmp_path) as memory:
        filled(memory)
        ids = prompt(2, 1)
        turn = Turn(session="s2", now=0.0)
        lease = memory.open(OWNER, memory.store.chain(ids), n_prompt=len(ids), capacity_tokens=len(ids), turn=turn)
        assert isinstance(lease, Lease)
        memory.purge(session="s2")
        assert found(memory, ids) == 24
        verify(memory, lease, ids, lease.hit_tokens)
        memory.store.check()
        lease.close()
        assert memory.store.stats().tiers[0].leased_pages == 0


STEPS = 40


@pytest.mark.parametrize("step", range(0, STEPS, 7))
def test_killed_at_any_step_it_is_done_again(tmp_path: Path, step: int) -> None:
    """The process dies before its n-th change of the files; what it left is served right, and erased by the next."""
    with worker(tmp_path) as memory:
        filled(memory)
    log = tmp_path / "ssd" / "slot-00"
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from forebay.kvstore import erase, log_care\n"
        "from forebay.kvstore.moves import mark_of\n"
        "left = [int(sys.argv[2])]\n"
        "def dying(call):\n"
        "    def made(*args):\n"
        "        left[0] -= 1\n"
        "        if left[0] < 0:\n"
        "            os.kill(os.getpid(), 9)\n"
        "        return call(*args)\n"
        "    return made\n"
        "erase._write, erase._libc.fallocate = dying(erase._write), dying(erase._libc.fallocate)\n"
        "log_care.purge(Path(sys.argv[1]), session=mark_of('s1'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(log), str(step)], check=False, capture_output=True)
    assert done.returncode in (0, -9), done.stderr
    assert not any(each.damage for each in survey(log, verify=True)), "nothing is torn"
    with worker(tmp_path, host_bytes=0) as memory:
        for turn in (0, 1):
            assert serve(memory, prompt(2, turn), "s2") == 36 + 12 * turn
    holes = [hole for each in survey(log, verify=False) for hole in each.holes]
    whole = {number: file_of(log, number).read_bytes() for number in numbers(log)}
    assert not any(any(whole[hole.segment][hole.start + 64 : hole.end]) for hole in holes), "the restart ended it"
    purge_log(log, session=mark_of("s1"))
    assert purge_log(log, session=mark_of("s1")).erased_records == 0
    origins = [found.record.label.origin for each in survey(log, verify=False) for found in each.found]
    assert all(origin.session != mark_of("s1") for origin in origins)
    with worker(tmp_path, host_bytes=0) as memory:
        checked(memory)


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with worker(tmp_path) as memory:
        filled(memory)
        serve(memory, [5] * 37, digest("build-42"))
        assert main(["store", "purge", str(tmp_path / "ssd"), "--session", "build-42"]) == 2
        told = capsys.readouterr().err
        assert (told.count("\n"), "in use by process" in told) == (1, True)
    path = str(tmp_path / "ssd")
    for name, erases in (("nobody", False), ("build-42", True), ("build-42", False)):
        assert main(["store", "purge", path, "--session", name, "--json"]) == 0
        assert (json.loads(capsys.readouterr().out)[0]["erased_records"] > 0) == erases
    assert main(["store", "verify", path]) == 0
    assert main(["store", "purge", path, "--tenant", ""]) == 0
    assert "erased_records" in capsys.readouterr().out
    with worker(tmp_path, host_bytes=0) as memory:
        assert (found(memory, prompt(2, 1)), found(memory, prompt(1, 1), "acme")) == (0, 48)
    for words in ([], ["--session", "a", "--tenant", "b"]):
        with pytest.raises(SystemExit):
            main(["store", "purge", path, *words])


def test_a_file_system_without_holes_gets_zeros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with worker(tmp_path) as memory:
        filled(memory)
    log = tmp_path / "ssd" / "slot-00"
    monkeypatch.setattr(erase._libc, "fallocate", lambda *_: -1)
    gone = [found for number in numbers(log) for found in purge(log, number, mark_of("s1"), None, 1 << 40)]
    assert gone
    for each in gone:
        image = file_of(log, each.place.segment).read_bytes()
        assert not any(image[each.place.offset + 64 : each.place.offset + each.place.total_bytes])


def test_headers() -> None:
    origin = Origin(class_name="agent", session=mark_of("s"), tenant=mark_of("t"))
    label = Label(group="latent", keys=(bytes(32),), before=None, start_tokens=0, end_tokens=4, origin=origin)
    record = Record(label=label, fingerprint=bytes(32), part=0, parts=1, rows=2, n_bytes=64, checksum=1, sequence=5)
    image = pack(record)
    assert unpack(image) == record
    at = erase.STATE_AT
    shared = image[:at] + erase.SHARED + image[at + 8 :]
    assert unpack(shared).label.origin == Origin(class_name="agent", tenant=mark_of("t"))
    with pytest.raises(Erased) as was:
        header_bytes(erased(3 * ALIGN_BYTES) + image[64:])
    assert was.value.total_bytes == 3 * ALIGN_BYTES
    for version in (1, VERSION + 1):
        with pytest.raises(OtherVersion):
            header_bytes(image[:4] + version.to_bytes(2, "little") + image[6:])


def test_files_of_the_version_before_are_set_aside(tmp_path: Path) -> None:
    with worker(tmp_path) as memory:
        filled(memory)
    log = tmp_path / "ssd" / "slot-00"
    for number in numbers(log):
        with open(file_of(log, number), "r+b") as file:
            os.pwrite(file.fileno(), (VERSION - 1).to_bytes(2, "little"), 4)
    with worker(tmp_path, host_bytes=0) as memory:
        assert found(memory, prompt(2, 1)) == 0
        assert memory.store.stats().ssd_events["other_version"] == len(numbers(log))
        assert serve(memory, prompt(2, 1), "s2") == 0
        assert found(memory, prompt(2, 1)) == 60 // 12 * 12 - 12

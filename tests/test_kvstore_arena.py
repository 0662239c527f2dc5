"""Shared memory that outlives a reader's or an owner's death exactly as long as it should."""

import os
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from forebay.kvstore.arena import Arena, ArenaError, read, sweep


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.arena"))


def owner_process(folder: Path, then: str) -> subprocess.Popen[str]:
    """A process with an arena of 1 MiB of sevens. It prints the path, then does `then`."""
    code = f"""
        import time
        from forebay.kvstore.arena import Arena
        arena = Arena({str(folder)!r}, "handoff", 1 << 20)
        arena.bytes[:] = 7
        print(arena.path, flush=True)
        {then}
    """
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)


def path_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_one_private_file_that_goes_with_its_arena(tmp_path: Path) -> None:
    with Arena(tmp_path / "run", "host", 100_000) as arena:
        (file,) = files(tmp_path / "run")
        assert str(file) == arena.path
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert file.stat().st_blocks * 512 >= 100_000, "its memory is there from the start"
        arena.bytes[-3:] = [1, 2, 3]
        into = np.empty(3, dtype=np.uint8)
        assert read(arena.path, 99_997, into)
        assert into.tolist() == [1, 2, 3]
        assert sweep(tmp_path / "run") == []
    assert files(tmp_path / "run") == []
    assert arena.bytes[-1] == 3, "views stay valid"
    arena.close()


def test_a_read_past_the_end_or_of_nothing_says_so(tmp_path: Path) -> None:
    into = np.empty(10, dtype=np.uint8)
    with Arena(tmp_path, "host", 64) as arena:
        assert not read(arena.path, 60, into)
        os.truncate(arena.path, 5)
        assert not read(arena.path, 0, into)
    assert not read(arena.path, 0, into)
    assert not read(str(tmp_path), 0, into)


def test_removed_at_an_ordinary_exit(tmp_path: Path) -> None:
    process = owner_process(tmp_path, "")
    assert path_of(process)
    assert process.wait(20) == 0
    assert files(tmp_path) == []


def test_a_forked_child_takes_nothing_away(tmp_path: Path) -> None:
    process = owner_process(tmp_path, "import os; os.fork() or exit(0); os.wait(); assert os.path.exists(arena.path)")
    path_of(process)
    assert process.wait(20) == 0
    assert files(tmp_path) == []


def test_a_killed_owners_bytes_stay_until_they_are_swept(tmp_path: Path) -> None:
    process = owner_process(tmp_path, "time.sleep(60)")
    path = path_of(process)
    assert sweep(tmp_path) == [], "its owner lives"
    process.send_signal(signal.SIGKILL)
    process.wait(20)
    into = np.empty(1 << 20, dtype=np.uint8)
    assert read(path, 0, into)
    assert (into == 7).all()
    assert sweep(tmp_path) == [path]
    assert files(tmp_path) == []
    assert not read(path, 0, into)


def test_a_reused_process_id_does_not_save_a_stale_file(tmp_path: Path) -> None:
    stale = tmp_path / f"host-00.{os.getpid()}.1.arena"
    stale.write_bytes(b"x")
    other = tmp_path / "notes.txt"
    other.write_bytes(b"x")
    assert sweep(tmp_path) == [str(stale)]
    assert other.exists()


def test_no_room_is_one_error_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ArenaError, match="no arena of"):
        Arena(tmp_path, "host", 1 << 50)
    assert files(tmp_path) == []
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ArenaError, match="no arena of"):
        Arena(tmp_path / "file", "host", 64)

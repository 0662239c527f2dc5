"""The run folder: one owner, and a sweep that ends what a killed owner started, and nothing else."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.cluster import processes
from forebay.cluster.processes import Process
from forebay.cluster.rundir import RunDir, RunDirTaken, read_endpoint


@pytest.fixture
def sleeper() -> Iterator[Process]:
    """A process with a child of its own."""
    code = "import subprocess, time; subprocess.Popen(['sleep', '60']); print('up', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    process = processes.find(child.pid)
    assert process is not None
    yield process
    processes.end([process])
    child.wait()


def test_a_folder_has_one_owner(tmp_path: Path) -> None:
    with RunDir(tmp_path / "run"), pytest.raises(RunDirTaken, match=f"pid {os.getpid()}"), RunDir(tmp_path / "run"):
        pass
    with RunDir(tmp_path / "run"):
        pass


def test_descendants_are_found_and_ended(sleeper: Process) -> None:
    below = processes.descendants([sleeper.pid])
    assert len(below) == 1
    assert sleeper in processes.descendants([os.getpid()])
    assert processes.end([sleeper]) == []
    assert not any(map(processes.alive, [sleeper, *below]))


def test_the_next_owner_sweeps_what_was_recorded(tmp_path: Path, sleeper: Process) -> None:
    run, arena = tmp_path / "run", tmp_path / "memory" / "pages.arena"
    arena.parent.mkdir()
    arena.write_bytes(b"x" * 100)
    run.mkdir(mode=0o700)
    (run / "processes.json").write_text(json.dumps([[sleeper.pid, sleeper.started]]))
    (run / "endpoint.json").write_text(json.dumps({"memory": str(arena.parent)}))
    (run / "ray").mkdir()
    (run / "ray" / "log").write_text("")
    with RunDir(run) as owned:
        swept = owned.sweep()
        assert (swept.processes, swept.files) == (1, 4)
        assert [entry.name for entry in run.iterdir()] == ["lock"]
    assert not arena.parent.exists()
    assert not processes.alive(sleeper)


def test_a_reused_pid_is_left_alone(tmp_path: Path, sleeper: Process) -> None:
    with RunDir(tmp_path / "run") as owned:
        owned.record([Process(sleeper.pid, sleeper.started - 1)])
        assert owned.sweep().processes == 0
    assert processes.alive(sleeper)


def test_a_torn_record_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "processes.json").write_text("[[1, 2], [3")
    with RunDir(tmp_path) as owned:
        assert owned.sweep().processes == 0


def test_an_owner_leaves_nothing_but_the_lock(tmp_path: Path) -> None:
    with RunDir(tmp_path / "run") as owned:
        memory = owned.make_memory(1 << 20)
        (memory / "pages.arena").write_bytes(b"x")
        owned.publish({"url": "http://127.0.0.1:1", "memory": str(memory)})
        assert read_endpoint(owned.path) == {"url": "http://127.0.0.1:1", "memory": str(memory)}
    assert not memory.exists()
    assert [entry.name for entry in (tmp_path / "run").iterdir()] == ["lock"]
    assert read_endpoint(tmp_path / "run") is None


def test_a_zombie_is_dead() -> None:
    child = subprocess.Popen(["sleep", "60"])
    process = processes.find(child.pid)
    assert process is not None
    processes.send([process], signal.SIGKILL)
    assert processes.wait_gone([process], 5.0) == []
    child.wait()

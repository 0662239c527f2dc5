"""The run folder of one endpoint: who owns it, what it started, where it answers.

    lock            flock'd by the running `up`, holds its pid
    processes.json  every process that `up` started, by pid and start time: what the next `up` may end
    endpoint.json   addresses, for `forebay status` and its like
    ray/            Ray's session folder and logs

Page arenas lie in a second folder on a memory file system, its path is written in endpoint.json. A killed `up`
leaves both folders behind; the next one sweeps them before it starts.
"""

import fcntl
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from forebay.cluster import processes
from forebay.cluster.processes import Process


class RunDirTaken(Exception):
    """Another `up` owns this folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What a killed `up` had left behind."""

    processes: int
    files: int


def default_path(port: int) -> Path:
    """Short, since Ray's unix sockets (at most 107 bytes) lie below it; of this user; one for each port."""
    return Path(tempfile.gettempdir()) / f"forebay-{os.getuid()}" / str(port)


def memory_path(run: Path, need_bytes: int) -> Path:
    """Where arenas lie: on the memory file system where it has room, else in the run folder itself."""
    shm = Path("/dev/shm")
    if shm.is_dir() and os.access(shm, os.W_OK) and shutil.disk_usage(shm).free >= need_bytes:
        return shm / ("forebay-" + "-".join(run.resolve().parts[1:]))
    return run / "arenas"


class RunDir:
    """Owns the folder between `with` and its end; all that stands in it is removed then, logs too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.memory: Path | None = None
        self._lock: int | None = None

    def __enter__(self) -> Self:
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self.path.stat().st_uid != os.getuid():
            raise PermissionError(f"{self.path} belongs to another user")
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(lock, 32).decode()
            os.close(lock)
            raise RunDirTaken(f"an endpoint runs in {self.path} already (pid {owner})") from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        self._lock = lock
        return self

    def __exit__(self, *_: object) -> None:
        assert self._lock is not None, "left without being entered"
        self._remove_contents()
        os.close(self._lock)
        self._lock = None

    def sweep(self) -> Swept:
        """Ends what a killed `up` started and removes its files. Touches only processes that it recorded."""
        recorded = [Process(*pair) for pair in _read(self.path / "processes.json") or []]
        living = [process for process in recorded if processes.alive(process)]
        left = processes.end(living)
        assert not left, f"{left} outlived SIGKILL"
        return Swept(processes=len(living), files=self._remove_contents())

    def record(self, started: list[Process]) -> None:
        """Remembers processes for a later sweep."""
        _write(self.path / "processes.json", [[process.pid, process.started] for process in started])

    def publish(self, endpoint: dict[str, Any]) -> None:
        """Says where the endpoint answers."""
        _write(self.path / "endpoint.json", endpoint)

    def make_memory(self, need_bytes: int) -> Path:
        """The arena folder, made."""
        self.memory = memory_path(self.path, need_bytes)
        self.memory.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self.memory

    def _remove_contents(self) -> int:
        """Removes everything but the lock; returns how many files that were."""
        old = _read(self.path / "endpoint.json") or {}
        folders = {Path(old["memory"])} if "memory" in old else set()
        folders |= {self.memory} if self.memory else set()
        count = sum(_remove(folder) for folder in folders)
        return count + sum(_remove(entry) for entry in self.path.iterdir() if entry.name != "lock")


def read_endpoint(path: Path) -> dict[str, Any] | None:
    """What the running endpoint of this folder published."""
    endpoint: dict[str, Any] | None = _read(path / "endpoint.json")
    return endpoint


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def _write(path: Path, value: Any) -> None:
    """In one step, so that a kill leaves the old text or the new."""
    scratch = path.with_name(f".{path.name}")
    scratch.write_text(json.dumps(value))
    scratch.replace(path)


def _remove(path: Path) -> int:
    """Removes a file or a folder; returns the number of files."""
    if path.is_dir() and not path.is_symlink():
        count = sum(len(names) for _, _, names in os.walk(path))
        shutil.rmtree(path, ignore_errors=True)
        return count
    path.unlink(missing_ok=True)
    return 1

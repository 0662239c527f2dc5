"""Workers over one arena, in one process: each with a process id of its own, and can die after any line."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from forebay.kvstore import directory, host, shared_entries, shared_table
from forebay.kvstore.class_limits import quota_pages
from forebay.kvstore.config import StoreConfig
from forebay.kvstore.device import DevicePool
from forebay.kvstore.directory import Directory
from forebay.kvstore.host import HostPool
from forebay.kvstore.layout import Layout
from forebay.kvstore.memory import Memory, _open_ssd
from forebay.kvstore.shared_file import SharedFile
from forebay.kvstore.shared_table import geometry_of
from forebay.kvstore.ssd import model_mark
from forebay.kvstore.store import Store

TRACED = {module.__file__ for module in (directory, host, shared_entries, shared_table)}


class Killed(BaseException):
    """The worker died here: nothing that it would have done happens."""


class Node:
    """Which process ids live, and the workers that have them."""

    def __init__(self, layout: Layout, config: StoreConfig, fingerprint: str = "twin") -> None:
        self.layout = layout
        self.config = config
        self.fingerprint = fingerprint
        self.living: set[int] = set()
        self._started = 0

    def is_alive(self, pid: int, started: int) -> bool:
        return pid in self.living

    def worker(self, **changes: Any) -> Memory:
        """`changes` of the configuration, as its rank."""
        config = replace(self.config, **changes)
        self._started += 1
        pid = self._started
        self.living.add(pid)
        store = Store(self.layout, config, self.fingerprint)
        ssd, failure = _open_ssd(self.layout, config, store)
        assert failure is None
        file = SharedFile(config.run_dir, "host-local", geometry_of(self.layout, config.host_bytes), self.is_alive)
        quotas = quota_pages({each.name: each.host_bytes for each in config.classes}, self.layout.page_bytes)
        shared = Directory(file, pid, 1, self.is_alive, quotas)
        pool = HostPool(
            shared,
            self.layout,
            model_mark(self.fingerprint),
            n_pages=store.tier_pages("host"),
            rank=config.rank,
            ranks=config.ranks,
        )
        return Memory(store, DevicePool(self.layout, config.device_bytes // self.layout.page_bytes), pool, ssd)

    def kill(self, memory: Memory) -> None:
        """As the kernel ends it: its lock is free, all else stays as it is."""
        file = file_of(memory)
        slot = memory.host.directory._slot if memory.host is not None else 0
        self.living.discard(int(memory.host.directory.table.workers["pid"][slot]) if memory.host is not None else 0)
        file.lock = lambda: False  # type: ignore[method-assign]
        file.unlock()  # its mapping would keep the lock in this process
        file.close()
        if memory.ssd is not None:
            memory.ssd.close()

    def killed_in(self, memory: Memory, act: Callable[[], None], lines: int) -> bool:
        """Do `act`, and kill the worker after so many lines of the shared tier's code. True where it came so far."""
        left = lines

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal left
            if frame.f_code.co_filename not in TRACED:
                return None
            if event == "line":
                left -= 1
                if left <= 0:
                    file_of(memory).lock = lambda: False  # type: ignore[method-assign]
                    raise Killed
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            act()
        except Killed:
            pass
        finally:
            sys.settrace(before)
        self.kill(memory)
        return left <= 0


def file_of(memory: Memory) -> SharedFile:
    assert memory.host is not None
    return memory.host.directory._file


def shared_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.shared"))

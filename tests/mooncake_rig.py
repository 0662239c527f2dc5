"""A real master and stores that share its pool, for tests. Skips where Mooncake is not installed."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from forebay.kvstore import memory as memory_module
from forebay.kvstore.config import StoreConfig
from forebay.kvstore.layout import Layout
from forebay.kvstore.memory import Memory, make_memory
from forebay.kvstore.pool_address import PoolError
from forebay.kvstore.pool_client import MooncakeClient, load
from forebay.kvstore.pool_master import KeptMaster
from forebay.kvstore.pool_tier import PoolTier
from tests.kvstore_twin import tiny_layout

Bytes = npt.NDArray[np.uint8]


def needs_mooncake() -> None:
    try:
        load("mooncake.store")
    except PoolError as error:
        pytest.skip(str(error), allow_module_level=True)


class SharedClient:
    """A client of the pool that many stores of this process use: to join and to leave takes a second."""

    def __init__(self, client: MooncakeClient) -> None:
        self._client = client
        self._buffer: Bytes | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def register(self, buffer: Bytes) -> None:
        self._buffer = buffer
        self._client.register(buffer)

    def close(self) -> None:
        if self._buffer is not None:
            self._client._store.unregister_buffer(self._buffer.ctypes.data)


@contextmanager
def shared(folder: Path, master: KeptMaster, layout: Layout, **changes: object) -> Iterator[None]:
    """Stores made meanwhile join by one client, which gives the pool its segment."""
    client = MooncakeClient(master.address, config(folder, master, layout, **changes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_module, "MooncakeClient", lambda address, config: SharedClient(client))
        yield
    client.close()


def config(folder: Path, master: KeptMaster, layout: Layout, **changes: object) -> StoreConfig:
    """Device pages for one prompt of the tests' tiny model, and the pool below them."""
    made = StoreConfig(
        device_bytes=18 * layout.page_bytes,
        run_dir=str(folder / "run"),
        checkpoints="prompt_end",
        pool=str(master.address),
        pool_segment_bytes=16 << 20,
        pool_queue_bytes=1 << 20,
        pool_ask_s=2.0,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


@contextmanager
def memory_of(layout: Layout, config: StoreConfig, fingerprint: str = "twin") -> Iterator[Memory]:
    """Joined when it begins, nothing pinned when it ends."""
    memory = make_memory(layout, config, fingerprint)
    try:
        assert pool_of(memory).traffic.wait_joined(20), pool_of(memory).traffic.failure
        yield memory
        memory.store.check()
    finally:
        memory.close()


def pool_of(memory: Memory) -> PoolTier:
    assert memory.pool_tier is not None
    return memory.pool_tier


def flush(memory: Memory) -> None:
    """All that was saved is in the pool, or known not to be."""
    assert pool_of(memory).traffic.flush(20)
    memory.settle()


def wait_until(condition: Callable[[], bool], wait_s: float, message: str) -> float:
    """Seconds until it held."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < wait_s, message
        time.sleep(0.02)
    return time.monotonic() - started


def large_layout() -> Layout:
    """As the tiny one, with states of 64 KiB: a checkpoint takes 256 KiB."""
    return tiny_layout(state_bytes=1 << 16)


@contextmanager
def process(master: KeptMaster, *words: str) -> Iterator["subprocess.Popen[str]"]:
    """Another process of the pool, joined: see mooncake_holder.py."""
    tests = Path(__file__).parent
    paths = {"PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent), *sys.path])}
    command = [sys.executable, str(tests / "mooncake_holder.py"), master.address.netloc, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | paths) as started:
        try:
            assert started.stdout is not None
            assert started.stdout.readline() == "joined\n"
            yield started
        finally:
            started.kill()

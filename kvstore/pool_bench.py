"""Figures of the cluster-wide pool beside Mooncake's own client in the same run: the same batches of the same sizes.

The objects lie in another process on this machine, so they travel by TCP. The tier's side does what a worker does:
from rows in memory to an acknowledged object, header and checksum included, and back to verified rows.
"""

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.synchronize import Event
from typing import TypeVar

import numpy as np

from forebay.kvstore.config import StoreConfig
from forebay.kvstore.layout import Layout, make_layout
from forebay.kvstore.lookup import STATES
from forebay.kvstore.moves import Label
from forebay.kvstore.pool_address import PoolAddress, PoolError
from forebay.kvstore.pool_client import Bytes, MooncakeClient
from forebay.kvstore.pool_master import KeptMaster
from forebay.kvstore.pool_object import PoolObject, object_of
from forebay.kvstore.pool_traffic import PoolTraffic
from forebay.ops.bench_report import Reference, Row

ROUNDS = 9
OBJECTS = 16
OBJECT_BYTES = 16 << 20
LAYERS = 4
SEGMENT_BYTES_MIN = 64 << 20
JOIN_S = 30.0
GB = 1e9
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """Seconds."""

    put: float
    plain_put: float
    get: float
    plain_get: float


def bench_pool(objects: int | None = None) -> Iterator[Row]:
    """Rows for the report, medians over ROUNDS. Raises PoolError where Mooncake cannot be had."""
    objects = objects or OBJECTS
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as folder, KeptMaster() as master:
        config = _config(folder, master.address, objects)
        with _holder(master.address, config), _joined(master.address, config) as traffic:
            client = traffic.client
            assert isinstance(client, MooncakeClient)
            memory = np.zeros(objects * OBJECT_BYTES, dtype=np.uint8)
            client.register(memory)
            rounds = [_round(traffic, client, memory, objects, number) for number in range(-1, ROUNDS)][1:]
    size = f"{objects} objects of {OBJECT_BYTES >> 20} MiB, TCP"

    def row(name: str) -> Row:
        ours, plain = (
            objects * OBJECT_BYTES / statistics.median(getattr(each, field) for each in rounds) / GB
            for field in (name, f"plain_{name}")
        )
        reference = Reference(name="Mooncake's own client", value=plain)
        return Row(name=f"pool, {name}, {size}", value=ours, unit="GB/s", reference=reference)

    yield row("put")
    yield row("get")


def _config(folder: str, address: PoolAddress, objects: int) -> StoreConfig:
    return StoreConfig(
        device_bytes=1,
        run_dir=folder,
        pool=str(address),
        pool_segment_bytes=0,
        pool_pin_s=0.0,
        pool_queue_bytes=(objects + 1) * OBJECT_BYTES,
        pool_read_s=JOIN_S,
    )


def _round(traffic: PoolTraffic, client: MooncakeClient, memory: Bytes, objects: int, number: int) -> _Round:
    """Names are new in each round, and what was put is removed at its end: the memory that it takes was touched."""
    rows = np.random.default_rng(number + 1).integers(0, 256, (LAYERS, OBJECT_BYTES // LAYERS), dtype=np.uint8)
    units = [_unit(number * objects + index + objects) for index in range(objects)]
    names = [f"plain-{number}-{index}" for index in range(objects)]
    sizes = [OBJECT_BYTES] * objects
    addresses = [int(memory.ctypes.data) + index * OBJECT_BYTES for index in range(objects)]
    memory.reshape(objects, *rows.shape)[:] = rows
    plain_put, troubles = _timed(partial(client.put, names, addresses, sizes))
    assert troubles == [None] * objects, troubles
    put, _ = _timed(lambda: _put(traffic, units, rows))
    plain_get, troubles = _timed(partial(client.get, names, addresses, sizes))
    assert troubles == [None] * objects, troubles
    get, _ = _timed(lambda: _get(traffic, units, rows))
    for name in [*names, *(unit.name for unit in units)]:
        client.remove(name)
    return _Round(put=put, plain_put=plain_put, get=get, plain_get=plain_get)


def _put(traffic: PoolTraffic, units: list[PoolObject], rows: Bytes) -> None:
    before = traffic.events
    for unit in units:
        assert traffic.put(unit, lambda: rows), traffic.events
    assert traffic.flush(JOIN_S)
    assert traffic.events == before, traffic.events


def _get(traffic: PoolTraffic, units: list[PoolObject], rows: Bytes) -> None:
    """As a restore does: a batch is fetched while the one before is taken."""
    half = len(units) // 2
    for answer in [traffic.read(units[:half]), traffic.read(units[half:])]:
        for fetched in answer.result():
            assert fetched.rows is not None, fetched.trouble
            assert fetched.rows.shape == rows.shape


def _unit(number: int) -> PoolObject:
    label = Label(group=STATES, keys=(number.to_bytes(32, "little"),), before=None, start_tokens=0, end_tokens=1)
    return object_of(_layout(), bytes(32), label)


def _layout() -> Layout:
    """Of states that make objects of that size."""
    return make_layout(
        block_tokens=512,
        global_layers=(LAYERS,),
        kda_layers=range(LAYERS),
        latent_row_bytes=1152,
        index_row_bytes=None,
        state_bytes=OBJECT_BYTES // LAYERS,
    )


def _timed(act: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    done = act()
    return time.perf_counter() - start, done


@contextmanager
def _joined(address: PoolAddress, config: StoreConfig) -> Iterator[PoolTraffic]:
    traffic = PoolTraffic(partial(MooncakeClient, address, config), _layout(), bytes(32), config)
    try:
        if not traffic.wait_joined(JOIN_S):
            raise PoolError(f"not joined: {traffic.failure}")
        yield traffic
    finally:
        traffic.close()


@contextmanager
def _holder(address: PoolAddress, config: StoreConfig) -> Iterator[None]:
    """Another process that gives memory for all."""
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    n_bytes = max(SEGMENT_BYTES_MIN, 6 * config.pool_queue_bytes)  # two sets, far from where the pool begins to evict
    process = context.Process(target=_hold, args=(address, config, n_bytes, ready, done), daemon=True)
    process.start()
    try:
        until = time.monotonic() + JOIN_S
        while not ready.wait(0.1):
            if not process.is_alive() or time.monotonic() > until:
                raise PoolError("the process that is to hold the objects did not join")
        yield
    finally:
        done.set()
        process.join(JOIN_S)


def _hold(address: PoolAddress, config: StoreConfig, n_bytes: int, ready: Event, done: Event) -> None:
    client = MooncakeClient(address, replace(config, pool_segment_bytes=n_bytes))
    ready.set()
    done.wait()
    client.close()

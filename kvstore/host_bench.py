"""Figures of the host tier beside plain copies between the same pages, in turns, so that both meet the same noise.

A put is the directory's entry, the copy of a unit's pages and their checksums; a get pins, copies and verifies.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forebay.kvstore.arena import start_time
from forebay.kvstore.checksum import copy_checked
from forebay.kvstore.device import DevicePool
from forebay.kvstore.directory import Directory
from forebay.kvstore.host import Bytes, HostPool
from forebay.kvstore.layout import LATENT, make_layout
from forebay.kvstore.moves import Label, Move, Pages
from forebay.kvstore.shared_file import SharedFile
from forebay.kvstore.shared_table import geometry_of
from forebay.ops.bench_report import Reference, Row

ROUNDS = 7
UNITS = 16
LAYERS = 8
BLOCK, ROW_BYTES = 512, 4096
GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """Seconds for all units."""

    put: float
    get: float
    copy_down: float
    copy_up: float
    summed_down: float


def bench_host() -> Iterator[Row]:
    """Rows for the report, medians over ROUNDS. The arena lies in shared memory where there is one."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else None) as folder:
        bench = _Bench(Path(folder), UNITS)
        rounds = [bench.round(number) for number in range(ROUNDS)]
        bench.host.close()
    n_bytes = bench.n_bytes

    def speed(name: str) -> float:
        return n_bytes / float(statistics.median(getattr(each, name) for each in rounds)) / GB

    size = f"{UNITS} units of {n_bytes // UNITS >> 20} MiB"
    yield Row(
        name=f"host, put, checksummed, {size}",
        value=speed("put"),
        unit="GB/s",
        reference=Reference(name="plain copy of the same pages", value=speed("copy_down")),
    )
    yield Row(
        name=f"host, get, verified, {size}",
        value=speed("get"),
        unit="GB/s",
        reference=Reference(name="plain copy of the same pages", value=speed("copy_up")),
    )
    yield Row(
        name=f"host, copy with its checksum, {size}",
        value=speed("summed_down"),
        unit="GB/s",
        reference=Reference(name="plain copy of the same pages", value=speed("copy_down")),
    )


class _Bench:
    def __init__(self, folder: Path, units: int) -> None:
        layout = make_layout(
            block_tokens=BLOCK,
            global_layers=range(LAYERS),
            kda_layers=(),
            latent_row_bytes=ROW_BYTES,
            index_row_bytes=None,
            state_bytes=0,
        )
        self.n_bytes = units * LAYERS * layout.page_bytes
        self._page_bytes, self._units = layout.page_bytes, units
        self._device = DevicePool(layout, units * LAYERS)
        self._pages = self._device.bytes.numpy()
        self._pages[:] = np.random.default_rng(0).integers(0, 256, self._pages.shape, dtype=np.uint8)
        file = SharedFile(folder, "bench", geometry_of(layout, self.n_bytes))
        directory = Directory(file, os.getpid(), start_time(os.getpid()))
        self.host = HostPool(directory, layout, bytes(32), n_pages=units * LAYERS, rank=0, ranks=1)

    def round(self, number: int) -> _Round:
        granules = self.host.directory.table.granules
        copy_down = _timed(lambda: _copied(self._pages, granules))
        put = _timed(lambda: self._put(number))
        copy_up = _timed(lambda: _copied(granules, self._pages))
        get = _timed(self._get)
        self._empty()
        summed_down = _timed(lambda: _summed(self._pages, granules))
        return _Round(put=put, get=get, copy_down=copy_down, copy_up=copy_up, summed_down=summed_down)

    def _put(self, number: int) -> None:
        for unit in range(self._units):
            key = (number * self._units + unit).to_bytes(32, "little")
            label = Label(group=LATENT, keys=(key,), before=None, start_tokens=0, end_tokens=BLOCK)
            pages = self._of(unit)
            down = Move(
                source="device",
                source_pages=pages,
                target="host",
                target_pages=pages,
                n_bytes=self._page_bytes,
                label=label,
                worth=1.0,
            )
            self.host.save(self._device, down, None)
        assert self.host.take_lost() == [], "all of it had room"

    def _get(self) -> None:
        ups = [
            Move(source="host", source_pages=pages, target="device", target_pages=pages, n_bytes=self._page_bytes)
            for pages in map(self._of, range(self._units))
        ]
        with self.host.reading(ups):
            assert not any(self.host.restore(self._device, up) for up in ups)

    def _empty(self) -> None:
        directory = self.host.directory
        for entry in range(directory.table.geometry.n_entries):
            directory.discard(entry, int(directory.table.serial[entry]))
        self.host.take_lost()

    def _of(self, unit: int) -> Pages:
        return np.arange(unit * LAYERS, (unit + 1) * LAYERS, dtype=np.int32)


def _copied(source: Bytes, target: Bytes) -> None:
    for page in range(len(source)):
        target[page] = source[page]


def _summed(source: Bytes, target: Bytes) -> None:
    for page in range(len(source)):
        copy_checked(target[page, None], source[page, None])


def _timed(act: Callable[[], None]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start

"""Figures of the SSD tier's log beside plain files on the same disk, in turns, so that both meet the same noise.

The plain side does no more than the disk asks for: one buffer, chunks of the same size, as many syncs; in the faster of
two ways, through the page cache or past it. Files are read after they were dropped from the page cache.
"""

import mmap
import os
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forebay.kvstore.log_folder import Bytes, Place, scan
from forebay.kvstore.moves import Label
from forebay.kvstore.segment_log import Part, SegmentLog
from forebay.ops.bench_report import Reference, Row

ROUNDS = 5
RECORDS = 64
RECORD_BYTES = 8 << 20
QUEUE_BYTES = 128 << 20
READ_AHEAD = 4
GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    write: float
    plain_write_direct: float
    plain_write_cached: float
    read: float
    plain_read_direct: float
    plain_read_cached: float
    restart: float
    full_scan: float


def bench_ssd(folder: Path, records: int = RECORDS) -> Iterator[Row]:
    """Rows for the report, medians over ROUNDS. `folder` is emptied of what this makes there."""
    rounds = [_round(folder / f"round-{number}", records) for number in range(ROUNDS)]
    size = f"{records} records of {RECORD_BYTES >> 20} MiB"

    def median(name: str) -> float:
        return float(statistics.median(getattr(each, name) for each in rounds))

    def row(name: str, value: str, plain: Sequence[str], plain_name: str) -> Row:
        reference = Reference(name=plain_name, value=max(map(median, plain)))
        return Row(name=f"ssd, {name}, {size}", value=median(value), unit="GB/s", reference=reference)

    writes, reads = (tuple(f"plain_{verb}_{way}" for way in ("direct", "cached")) for verb in ("write", "read"))
    yield row("write", "write", writes, "plain sequential write, same syncs")
    yield row("read, verified", "read", reads, "plain sequential read")
    yield Row(name=f"ssd, restart scan, {size}", value=median("restart"), unit="GB/s")
    yield Row(name=f"ssd, scan of every byte, {size}", value=median("full_scan"), unit="GB/s")


def _round(folder: Path, records: int) -> _Round:
    folder.mkdir(parents=True)
    n_bytes = records * RECORD_BYTES
    data = np.random.default_rng(0).integers(0, 256, RECORD_BYTES, dtype=np.uint8)
    log = _open(folder / "log", n_bytes)
    time.sleep(0.5)  # the writer readies its memory at a worker's start, not while it serves
    start = time.perf_counter()
    places = [_append(log, data, number) for number in range(records)]
    assert log.flush(), log.failure
    write_s, syncs = time.perf_counter() - start, log.syncs
    direct_s, cached_s = (_plain_write(folder / "plain", data, records, syncs, flags) for flags in (os.O_DIRECT, 0))
    read_direct_s, read_cached_s = (_plain_read(folder / "plain", records, flags) for flags in (os.O_DIRECT, 0))
    _forget(folder / "log")
    read_s = _read(log, places)
    log.close()
    _forget(folder / "log")
    restart_s = _restart(folder / "log", n_bytes)
    _forget(folder / "log")
    full_scan_s = _full_scan(folder / "log")
    _remove(folder)
    return _Round(
        write=n_bytes / write_s / GB,
        plain_write_direct=n_bytes / direct_s / GB,
        plain_write_cached=n_bytes / cached_s / GB,
        read=n_bytes / read_s / GB,
        plain_read_direct=n_bytes / read_direct_s / GB,
        plain_read_cached=n_bytes / read_cached_s / GB,
        restart=n_bytes / restart_s / GB,
        full_scan=n_bytes / full_scan_s / GB,
    )


def _open(path: Path, n_bytes: int) -> SegmentLog:
    return SegmentLog(
        path, quota_bytes=4 * n_bytes, segment_bytes=n_bytes, queue_bytes=QUEUE_BYTES, fingerprint=bytes(32)
    )


def _append(log: SegmentLog, data: Bytes, number: int) -> Place:
    label = Label(
        group="latent", keys=(number.to_bytes(32, "little"),), before=None, start_tokens=0, end_tokens=RECORD_BYTES
    )
    part = Part(label=label, data=data.reshape(8, -1))
    while (places := log.append([part], tuple)) is None:
        assert log.failure is None, log.failure
        time.sleep(0.001)
    return places[0]


def _plain_write(path: Path, data: Bytes, records: int, syncs: int, flags: int) -> float:
    buffer = mmap.mmap(-1, RECORD_BYTES)
    buffer.write(data.tobytes())
    path.unlink(missing_ok=True)
    descriptor = _open_plain(path, os.O_WRONLY | os.O_CREAT, flags)
    every = -(-records // syncs)
    start = time.perf_counter()
    for number in range(records):
        os.pwrite(descriptor, buffer, number * RECORD_BYTES)
        if number % every == every - 1:
            os.fdatasync(descriptor)
    os.fdatasync(descriptor)
    taken = time.perf_counter() - start
    os.close(descriptor)
    return taken


def _plain_read(path: Path, records: int, flags: int) -> float:
    _forget(path.parent)
    buffer = mmap.mmap(-1, RECORD_BYTES)
    buffer.write(bytes(RECORD_BYTES))  # so that its pages are there
    descriptor = _open_plain(path, os.O_RDONLY, flags)
    start = time.perf_counter()
    for number in range(records):
        os.preadv(descriptor, [buffer], number * RECORD_BYTES)
    taken = time.perf_counter() - start
    os.close(descriptor)
    return taken


def _open_plain(path: Path, mode: int, flags: int) -> int:
    try:
        return os.open(path, mode | flags, 0o600)
    except OSError:  # a file system without a way past the page cache
        return os.open(path, mode, 0o600)


def _read(log: SegmentLog, places: list[Place]) -> float:
    """As a restore does: a few ahead of the one that is taken."""
    start = time.perf_counter()
    ahead: deque[Future[Bytes | None]] = deque()
    for place in places:
        ahead.append(log.fetch(place))
        if len(ahead) > READ_AHEAD:
            _take(log, ahead.popleft())
    while ahead:
        _take(log, ahead.popleft())
    return time.perf_counter() - start


def _take(log: SegmentLog, read: "Future[Bytes | None]") -> None:
    data = read.result()
    assert data is not None
    log.give_back(data)


def _restart(path: Path, n_bytes: int) -> float:
    start = time.perf_counter()
    log = _open(path, n_bytes)
    taken = time.perf_counter() - start
    log.close()
    return taken


def _full_scan(path: Path) -> float:
    start = time.perf_counter()
    numbers = [int(file.stem, 16) for file in path.glob("*.segment")]
    assert all(each for number in numbers for each in scan(path, number, verify=True))
    return time.perf_counter() - start


def _forget(folder: Path) -> None:
    """Out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()

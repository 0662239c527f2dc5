"""Care of a log's folder from outside a worker: what lies there, whether it is whole, and what can go.

`survey` reads only, also under a running worker (whose last records may not be whole yet); `collect` and `purge` take
the lock.
"""

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from forebay.kvstore.erase import purge as erase_records
from forebay.kvstore.log_folder import Damage, Found, Hole, LogError, LogFolder, file_of, numbers, scan
from forebay.kvstore.ssd_slots import SLOTS

SPARE = ".rewritten"


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSurvey:
    """One segment file as it is now."""

    path: Path
    segment: int
    n_bytes: int
    found: tuple[Found, ...]
    damage: tuple[Damage, ...]
    holes: tuple[Hole, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What `collect` did to one log."""

    path: Path
    removed_segments: int
    rewritten_segments: int
    dropped_records: int
    kept_records: int
    freed_bytes: int
    left_bytes: int


def logs(path: Path) -> list[Path]:
    """The folders of logs at `path`, and below it or its clusters' folders. Raises LogError where there is none."""
    if not path.is_dir():
        raise LogError(f"{path}: no such folder")
    below = sorted(folder for where in (SLOTS, f"*/{SLOTS}") for folder in path.glob(where) if folder.is_dir())
    found = [folder for folder in (path, *below) if numbers(folder) or (folder / "lock").exists()]
    if not found:
        raise LogError(f"{path}: holds no log of the SSD tier")
    return found


def survey(path: Path, *, verify: bool) -> Iterator[SegmentSurvey]:
    """Every segment of one log; with `verify` all data is read. Raises LogError."""
    for number in numbers(path):
        try:
            size = file_of(path, number).stat().st_size
            each = list(scan(path, number, verify=verify))
        except FileNotFoundError:  # given up for a newer one meanwhile
            continue
        except OSError as error:
            raise LogError(f"{file_of(path, number)}: {error.strerror}") from None
        found = tuple(one for one in each if isinstance(one, Found))
        damage = tuple(one for one in each if isinstance(one, Damage))
        holes = tuple(one for one in each if isinstance(one, Hole))
        yield SegmentSurvey(path=path, segment=number, n_bytes=size, found=found, damage=damage, holes=holes)


def live(found: list[Found]) -> set[tuple[int, int]]:
    """(segment, offset) of the records that a restart could hit: of runs the longest, of checkpoints whole ones, once.

    A run is covered where a longer one, or a newer one of the same length, has its last block too.
    """
    kept: set[tuple[int, int]] = set()
    covered: set[tuple[bytes, str, bytes]] = set()
    parts: dict[tuple[bytes, bytes], dict[int, Found]] = defaultdict(dict)
    for each in sorted(found, key=lambda each: (len(each.record.label.keys), each.record.sequence), reverse=True):
        record, label = each.record, each.record.label
        if record.parts > 1:
            parts[record.fingerprint, label.keys[0]].setdefault(record.part, each)
        elif (record.fingerprint, label.group, label.keys[-1]) not in covered:
            kept.add((each.place.segment, each.place.offset))
            covered.update((record.fingerprint, label.group, key) for key in label.keys)
    for siblings in parts.values():
        if len(siblings) == next(iter(siblings.values())).record.parts:
            kept.update((each.place.segment, each.place.offset) for each in siblings.values())
    return kept


def collect(path: Path, keep_bytes: int | None = None) -> Collected:
    """Drop what can never be hit, and the oldest segments beyond `keep_bytes`. Raises LogError; OSError from the disk.

    A segment with dead records is written anew beside itself, then takes its own place: whenever this is interrupted,
    every record is still there.
    """
    with LogFolder(path) as folder:
        _drop_spares(path)
        segments = list(survey(path, verify=True))
        before = sum(each.n_bytes for each in segments)
        kept = live([found for each in segments for found in each.found])
        removed = rewritten = 0
        for each in segments:
            alive = [found for found in each.found if (found.place.segment, found.place.offset) in kept]
            if not alive:
                folder.remove(each.segment)
                removed += 1
            elif each.n_bytes > sum(found.record.total_bytes for found in alive):
                _rewrite(folder, each.segment, alive)
                rewritten += 1
        removed += _cut(folder, keep_bytes)
        folder.sync()
        left = list(survey(path, verify=False))
    records = sum(len(each.found) for each in segments)
    left_records, left_bytes = sum(len(each.found) for each in left), sum(each.n_bytes for each in left)
    return Collected(
        path=path,
        removed_segments=removed,
        rewritten_segments=rewritten,
        dropped_records=records - left_records,
        kept_records=left_records,
        freed_bytes=before - left_bytes,
        left_bytes=left_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Purged:
    """What `purge` did to one log."""

    path: Path
    erased_records: int
    erased_bytes: int
    left_records: int


def purge(path: Path, *, session: bytes | None = None, tenant: bytes | None = None) -> Purged:
    """Erase the records that are the session's alone, or the tenant's, by their mark (`moves.mark_of`). Raises
    LogError; OSError from the disk. Interrupted anywhere, it has erased some; done again, it erases the rest."""
    with LogFolder(path) as folder:
        _drop_spares(path)
        erased = [
            found
            for number in folder.numbers()
            for found in erase_records(path, number, session, tenant, upto=(1 << 64) - 1)
        ]
        left = sum(len(each.found) for each in survey(path, verify=False))
    n_bytes = sum(found.record.total_bytes for found in erased)
    return Purged(path=path, erased_records=len(erased), erased_bytes=n_bytes, left_records=left)


def _drop_spares(path: Path) -> None:
    """Half-written copies of segments, of a `collect` that was interrupted."""
    for spare in path.glob(f"*{SPARE}"):
        spare.unlink()


def _rewrite(folder: LogFolder, segment: int, alive: list[Found]) -> None:
    path = folder.file(segment)
    spare = path.with_suffix(SPARE)
    with open(path, "rb") as old, open(os.open(spare, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as new:
        for found in alive:
            old.seek(found.place.offset)
            new.write(old.read(found.place.n_bytes).ljust(found.record.total_bytes, b"\0"))
        new.flush()
        os.fsync(new.fileno())
    spare.rename(path)


def _cut(folder: LogFolder, keep_bytes: int | None) -> int:
    """Remove the oldest segments until no more than `keep_bytes` are left. Returns how many."""
    sizes = {number: folder.file(number).stat().st_size for number in folder.numbers()}
    held, removed = sum(sizes.values()), 0
    for number, size in sizes.items():
        if keep_bytes is None or held <= keep_bytes:
            break
        folder.remove(number)
        held, removed = held - size, removed + 1
    return removed

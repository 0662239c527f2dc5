"""`forebay store ...`: what lies on the SSD tier of a stopped or running endpoint, as lines or as JSON."""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forebay.kvstore.log_care import SegmentSurvey, collect, logs, purge, survey
from forebay.kvstore.log_folder import LogError
from forebay.kvstore.moves import mark_of
from forebay.router.session import digest


def store_ls(path: Path, as_json: bool) -> int:
    """A line a segment."""
    return _told(path, as_json, lambda log: (_segment(each) for each in survey(log, verify=False)))


def store_inspect(path: Path, as_json: bool) -> int:
    """A line a record."""
    return _told(path, as_json, lambda log: (row for each in survey(log, verify=False) for row in _records(each)))


def store_verify(path: Path, as_json: bool) -> int:
    """Reads every byte; a line a stretch that is no record. 1 where there is one."""
    whole: Counter[str] = Counter()

    def rows(log: Path) -> Iterator[dict[str, Any]]:
        for each in survey(log, verify=True):
            whole.update(records=len(each.found), bytes=sum(found.place.n_bytes for found in each.found))
            for harm in each.damage:
                whole["damage"] += 1
                yield {"log": str(log), "segment": harm.segment, "from": harm.start, "to": harm.end, "is": harm.harm}

    status = _told(path, as_json, rows)
    if not as_json and not status:
        print(f"{whole['records']} records intact, {whole['bytes']} bytes; {whole['damage']} stretches are not")
    return status or int(whole["damage"] > 0)


def store_gc(path: Path, keep_bytes: int | None, as_json: bool) -> int:
    """What was removed, a line a log."""
    return _told(path, as_json, lambda log: [{**asdict(collect(log, keep_bytes)), "path": str(log)}])


def store_purge(path: Path, session: str | None, tenant: str | None, as_json: bool) -> int:
    """What was erased, a line a log. `session`: a client's own name of it, or the key that logs show."""
    marks = [None] if session is None else [mark_of(digest(session)), mark_of(session)]
    tenant_mark = None if tenant is None else mark_of(tenant)

    def rows(log: Path) -> list[dict[str, Any]]:
        done = [purge(log, session=mark, tenant=tenant_mark) for mark in marks]
        erased = {name: sum(getattr(each, name) for each in done) for name in ("erased_records", "erased_bytes")}
        return [{"path": str(log), **erased, "left_records": done[-1].left_records}]

    return _told(path, as_json, rows)


def _told(path: Path, as_json: bool, rows_of: Callable[[Path], Any]) -> int:
    try:
        rows = [row for log in logs(path) for row in rows_of(log)]
    except (LogError, OSError) as error:
        print(f"forebay: {error}", file=sys.stderr)
        return 2
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        for row in rows:
            print("  ".join(f"{name} {value}" for name, value in row.items()))
    return 0


def _segment(each: SegmentSurvey) -> dict[str, Any]:
    groups = Counter(found.record.label.group for found in each.found)
    return {
        "log": str(each.path),
        "segment": each.segment,
        "bytes": each.n_bytes,
        "records": len(each.found),
        "erased": len(each.holes),
        **dict(sorted(groups.items())),
        **Counter(harm.harm for harm in each.damage),
    }


def _records(each: SegmentSurvey) -> Iterator[dict[str, Any]]:
    for found in each.found:
        record, label = found.record, found.record.label
        yield {
            "log": str(each.path),
            "segment": each.segment,
            "at": found.place.offset,
            "group": label.group,
            "tokens": f"{label.start_tokens}:{label.end_tokens}",
            "part": f"{record.part + 1}/{record.parts}",
            "bytes": record.n_bytes,
            "rows": record.rows,
            "class": label.origin.class_name,
            "key": label.keys[-1].hex(),
            "model": record.fingerprint.hex()[:16],
            "sequence": record.sequence,
        }

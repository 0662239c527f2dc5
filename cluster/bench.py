"""`forebay bench ...`: figures as a table, and as JSON in the one form of ops/bench_report.py."""

import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from forebay.ops.bench_report import Row, report, table, write_json


def bench_demo(model: str, threads: int, json_path: Path | None) -> int:
    from forebay.workers.bench import bench_workers

    return _say(bench_workers(model, threads), json_path)


def bench_classes(url: str, requests: int, json_path: Path | None) -> int:
    import asyncio

    from forebay.cluster.status import get_json
    from forebay.ops.flood import Flood, FloodError, measure

    status = get_json(f"{url}/status")
    if status is None:
        print(f"forebay: no endpoint answers at {url}: `forebay up`, or name it with --url", file=sys.stderr)
        return 1
    try:
        rows = asyncio.run(measure(Flood(url=url, model=status["model"], interactive=requests)))
    except FloodError as error:
        print(f"forebay: {error}", file=sys.stderr)
        return 1
    return _say(rows, json_path)


def bench_store(folder: Path | None, json_path: Path | None) -> int:
    """The SSD rows are those of the disk on which `folder` lies. Without Mooncake there are no rows of the pool."""
    from forebay.cluster.bench_lookup import bench_lookup
    from forebay.kvstore.host_bench import bench_host
    from forebay.kvstore.pool_address import PoolError
    from forebay.kvstore.pool_bench import bench_pool
    from forebay.kvstore.ssd_bench import bench_ssd
    from forebay.workers.bench_prefetch import bench_prefetch

    try:
        with tempfile.TemporaryDirectory(prefix="forebay-bench-", dir=folder) as made:
            rows = [*bench_lookup(), *bench_host(), *bench_ssd(Path(made)), *bench_prefetch(Path(made) / "prefetch")]
    except OSError as error:
        print(f"forebay: {error}", file=sys.stderr)
        return 2
    try:
        rows += bench_pool()
    except PoolError as error:
        print(f"forebay: no figures of the pool: {error}", file=sys.stderr)
    return _say(rows, json_path)


def _say(rows: Iterable[Row], json_path: Path | None) -> int:
    made = report(rows)
    print(table(made))
    if json_path is not None:
        write_json(made, json_path)
    return 0

"""`forebay bench ...`: figures as a table, and as JSON in the one form of ops/bench_report.py."""

from pathlib import Path

from forebay.ops.bench_report import report, table, write_json
from forebay.workers.bench import bench_workers


def bench_demo(model: str, threads: int, json_path: Path | None) -> int:
    made = report(bench_workers(model, threads))
    print(table(made))
    if json_path is not None:
        write_json(made, json_path)
    return 0

"""`forebay bench kernels`: measures the operators on the device at hand, or compares two records.

Needs torch alone, and triton where there is a GPU; no cluster, no HTTP.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

from forebay.ops import bench_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="F", help="also write the record to this file")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"), help="show two records side by side")
    parser.add_argument("--variants", action="store_true", help="ways not measured yet, beside what is tuned")
    parser.add_argument("--repeats", type=int, default=15, help="runs a figure is the median of")


def run(args: argparse.Namespace) -> int:
    if args.compare:
        print(compare(*args.compare))
        return 0
    import torch  # not needed to compare records

    if args.variants:
        from forebay.kernels import bench_attention_variants, bench_moe_variants  # import triton

        parts: tuple[ModuleType, ...] = (bench_attention_variants, bench_moe_variants)
    else:
        from forebay.kernels import bench_attention, bench_attnres, bench_kda, bench_moe, bench_slice

        parts = (bench_kda, bench_attention, bench_moe, bench_attnres, bench_slice)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made = bench_report.report(_told(row for part in parts for row in part.rows(device, args.repeats)))
    print(bench_report.table(made))
    if args.json:
        bench_report.write_json(made, args.json)
    return 0


def _told(rows: Iterable[bench_report.Row]) -> Iterator[bench_report.Row]:
    """Each row also at once: a run that is cut short has told what it measured."""
    for row in rows:
        print(f"{row.name}: {row.value:.4g} {row.unit}", file=sys.stderr, flush=True)
        yield row


def compare(first: Path, second: Path) -> str:
    """A line for each figure of both records: first, second, second / first."""
    one, two = (_figures(path) for path in (first, second))
    shared = [name for name in one if name in two]
    width = max(map(len, shared), default=0)
    lines = [f"{n:{width}}  {one[n]:10.4g}  {two[n]:10.4g}  {two[n] / one[n]:.3f}" for n in shared if one[n]]
    return "\n".join([f"{'':{width}}  {first.name:>10}  {second.name:>10}  ratio", *lines])


def _figures(path: Path) -> dict[str, float]:
    return {row["name"]: float(row["value"]) for row in json.loads(path.read_text())["rows"]}


def main() -> int:
    parser = argparse.ArgumentParser(prog="forebay bench kernels", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())

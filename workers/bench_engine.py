"""`forebay bench engine`: one model of random weights on one device, without store, handoff or network.

Decode by batch and context, prefill by length, a warm prefill, start to first token, where a step's time goes, distinct
experts met, and how fast a link must be for the cache that prefill makes; each beside the floor that follows from the
shape, and beside vLLM's published figure where there is one. Decode's contexts are made up (random rows and states in
the pages), so that none of them has to be prefilled. Needs torch alone, and triton where there is a GPU.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.ops import bench_report
from forebay.ops.bench_report import Row

if TYPE_CHECKING:  # the command's flags need no torch
    import torch

    from forebay.kernels.shapes import ModelShape
    from forebay.workers.engine_plan import Mode

SHAPES = ("demo", "kimi-linear-48b", "k3.1-slice")
MODES = ("fast", "exact")
PARTS = ("start", "decode", "prefill", "warm")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="demo", help="default demo; the others need a GPU")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")
    parser.add_argument("--threads", type=int, default=1, help="of torch on a CPU (default 1, as a worker has)")
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=f"of {', '.join(PARTS)} (default all)")
    add(
        "--modes", nargs="+", choices=MODES, default=MODES, metavar="MODE", help="fast, exact (default those there are)"
    )
    parser.add_argument("--json", type=Path, metavar="F", help="also write the record to this file")


def run(args: argparse.Namespace) -> int:
    import torch

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        print("forebay: --device cuda: torch sees no GPU here", file=sys.stderr)
        return 2
    if device == "cpu" and args.shape != "demo":
        print(f"forebay: --shape {args.shape}: its weights need a GPU; demo runs on a CPU", file=sys.stderr)
        return 2
    if device == "cpu":
        torch.set_num_threads(args.threads)
    made = bench_report.report(_told(args.shape, device, args.parts, args.modes))
    print(bench_report.table(made))
    if args.json:
        bench_report.write_json(made, args.json)
    return 0


def _told(name: str, device_type: str, parts: list[str], modes: list[str]) -> Iterator[Row]:
    """Each row also at once, as progress: a run that is cut short has told what it measured."""
    began = time.perf_counter()
    for row in _rows(name, device_type, parts, modes):
        print(f"{time.perf_counter() - began:6.1f} s  {row.name}: {row.value:.4g} {row.unit}", file=sys.stderr)
        sys.stderr.flush()
        yield row


def _rows(name: str, device_type: str, parts: list[str], modes: list[str]) -> Iterator[Row]:
    import torch

    from forebay.workers.engine_make import modes_of
    from forebay.workers.engine_plan import shape_of
    from forebay.workers.engine_start import start_rows

    device, shape = torch.device(device_type), shape_of(name)
    chosen = [mode for mode in modes_of(device) if mode in modes]
    for mode in chosen:
        if "start" in parts:  # before this process holds weights: the started one needs the device's memory
            yield from start_rows(shape, mode, device_type)
    for mode in chosen:
        yield from _passes(mode, shape, device, parts)


def _passes(mode: "Mode", shape: "ModelShape", device: "torch.device", parts: list[str]) -> Iterator[Row]:
    """Of one engine, which is gone before the next is made."""
    from forebay.workers.engine_make import make_engine
    from forebay.workers.engine_plan import plan_for
    from forebay.workers.engine_rows import EngineBench

    plan = plan_for(device.type, mode)
    bench = EngineBench(make_engine(mode, shape, plan, device), shape, plan, device)
    for part, rows in (("decode", bench.decode), ("prefill", bench.prefill), ("warm", bench.warm)):
        if part in parts:
            yield from rows()


def main() -> int:
    parser = argparse.ArgumentParser(prog="forebay bench engine", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())

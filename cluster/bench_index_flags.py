"""The flags of `forebay bench index`. Light to import: the command line reads them whatever verb was asked for."""

import argparse
import sys
from pathlib import Path

EVERY = "every"
TRACE_BLOCK_TOKENS = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("trace", type=Path, metavar="TRACE", help="Mooncake JSONL or weka sessions, plain or .gz")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--capacity", default="inf", metavar="TOKENS|inf", help="tokens whose rows fit (default inf)")
    size.add_argument("--capacity-bytes", type=int, metavar="N", help="bytes; checkpoints are charged at --shape")
    add("--shape", default="k3.1-pro", metavar="NAME", help="whose rows and states are charged (default k3.1-pro)")
    add("--evict", default="forebay", choices=("lru", "forebay", "optimal"), help="default forebay")
    add("--checkpoints", metavar="P", help="every, prompt_end, junction, interval:N, or several joined by +")
    add("--lanes", type=int, default=0, metavar="N", help="replay weka sessions in N closed lanes")
    add("--seconds", type=float, default=7200.0, metavar="S", help="how long the lanes run (default 7200)")
    add("--warm", type=float, metavar="S", help="not counted at first (default: a quarter of --seconds, with lanes)")
    add(
        "--block-tokens",
        type=int,
        default=TRACE_BLOCK_TOKENS,
        metavar="N",
        help=f"of weka sessions: a multiple of 64 (default {TRACE_BLOCK_TOKENS})",
    )
    add("--json", type=Path, metavar="F", help="write the rows to this file as well")


def run(args: argparse.Namespace) -> int:
    from forebay.cluster.bench_index import IndexBench, bench_index
    from forebay.kvstore.policy import DEFAULT_CHECKPOINTS

    in_bytes = args.capacity_bytes is not None
    try:
        bench = IndexBench(
            trace=args.trace,
            capacity_tokens=None if in_bytes or args.capacity == "inf" else _tokens(args.capacity),
            capacity_bytes=args.capacity_bytes,
            shape=args.shape,
            evict=args.evict,
            checkpoints=args.checkpoints or (DEFAULT_CHECKPOINTS if in_bytes else EVERY),
            lanes=args.lanes,
            seconds=args.seconds,
            warm_s=args.warm if args.warm is not None else args.seconds / 4 if args.lanes else 0.0,
            block_tokens=args.block_tokens,
        )
    except ValueError as error:
        print(f"forebay: {error}", file=sys.stderr)
        return 2
    return bench_index(bench, args.json)


def _tokens(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"capacity: {text!r} is neither a number of tokens nor inf")
    return int(text)

"""`forebay replay TRACE --url U`: the flags, the progress line, the printed report."""

import argparse
import asyncio
import hashlib
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic

from forebay.ops.bench_report import report, table, write_json
from forebay.ops.prompt_text import Sizes
from forebay.ops.replay import EndpointError, Options, Replayed, replay
from forebay.ops.replay_report import DEFINITIONS, rows, schedule_kept
from forebay.ops.trace import BLOCK_TOKENS, TraceError, read

QUIET_EVERY_S = 10.0  # between progress lines where stderr is no terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags of the command."""
    add = parser.add_argument
    add("trace", type=Path, help="Mooncake JSONL, plain or .gz")
    add("--url", required=True, help="the endpoint, without /v1")
    add("--model", help="model name; without it the first that the endpoint lists")
    add("--api", choices=("chat", "completions"), default="chat")
    add("--speed", type=_positive, default=1.0, help="2 replays an hour in half an hour (default 1)")
    add("--limit", type=_count, help="send the first N requests that fit the context")
    add("--max-concurrency", type=_count, default=64, help="requests in flight at most (default 64)")
    add("--output-cap", type=_count, help="tokens of an answer at most")
    add("--block-tokens", type=_count, default=BLOCK_TOKENS, help="tokens that a block of 512 becomes (default 512)")
    add("--chars-per-token", type=_positive, default=1.0, help="1 for a tokenizer of bytes, about 4 for words")
    add("--context", type=_count, help="skip and count requests of more tokens, prompt and answer together")
    add("--timeout-s", type=_positive, default=600.0, help="seconds for one request (default 600)")
    add("--api-key", help="sent as a bearer token")
    add("--json", type=Path, help="write the report to this file as well")


def options(args: argparse.Namespace) -> Options:
    """The flags as one value."""
    return Options(
        url=args.url.rstrip("/").removesuffix("/v1"),
        model=args.model,
        api=args.api,
        speed=args.speed,
        limit=args.limit,
        max_concurrency=args.max_concurrency,
        sizes=Sizes(block_tokens=args.block_tokens, chars_per_token=args.chars_per_token, output_cap=args.output_cap),
        context_tokens=args.context,
        timeout_s=args.timeout_s,
        api_key=args.api_key,
    )


def run(args: argparse.Namespace) -> int:
    """Replays and prints; 1 when nothing could be sent or a request failed."""
    try:
        requests = read(args.trace)
        replayed = asyncio.run(replay(requests, options(args), progress()))
    except (TraceError, EndpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    made = report(rows(replayed))
    print(f"\n{_provenance(args)}\n\n{table(made)}\n\n{DEFINITIONS}")
    if not schedule_kept(replayed):
        print("\nDEGRADED: the client could not keep the schedule (send lag); raise --max-concurrency or lower --speed")
    if args.json:
        write_json(made, args.json)
    return 0 if _all_whole(replayed) else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="forebay replay", description="Replay a trace against an endpoint.")
    add_arguments(parser)
    return run(parser.parse_args(argv))


def progress() -> Callable[[str], None]:
    """One line that is written over on a terminal; elsewhere a line now and then."""
    terminal, last_s = sys.stderr.isatty(), monotonic()

    def show(line: str) -> None:
        nonlocal last_s
        if terminal:
            print(f"\r{line}", end="", file=sys.stderr, flush=True)
        elif monotonic() - last_s >= QUIET_EVERY_S:
            last_s = monotonic()
            print(line, file=sys.stderr, flush=True)

    return show


def _all_whole(replayed: Replayed) -> bool:
    return bool(replayed.answers) and all(answer.reply.error is None for answer in replayed.answers)


def _provenance(args: argparse.Namespace) -> str:
    digest = hashlib.sha256(args.trace.read_bytes()).hexdigest()[:16]
    flags = [(name.replace("_", "-"), getattr(args, name)) for name in _SHOWN]
    told = " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in flags if value is not None)
    return f"trace {args.trace.name} (sha256 {digest}), open loop, recorded prompts, session order kept\n{told}"


_SHOWN = (
    *("url", "model", "api", "speed", "limit", "max_concurrency"),
    *("output_cap", "block_tokens", "chars_per_token", "context", "timeout_s"),
)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be above zero")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value

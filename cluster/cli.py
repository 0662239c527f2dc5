"""The command line. Each verb imports its room only when it is called, so that most need neither Ray nor torch."""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

DEFAULT_URL = "http://127.0.0.1:8000"
EXAMPLES = """\
examples:
  forebay up                                    two clusters with the built-in model on 127.0.0.1:8000
  forebay up --model /models/kimi --decode 2    your own model folder, two decode workers a cluster
  forebay up site.toml                          everything from one file; `forebay config check` shows its keys
  forebay up --store mooncake                   what one worker has computed, every worker finds
  forebay status                                clusters and workers: pids, states, slots, pages
  forebay chat                                  talk to it in the terminal
  forebay check resume                          cold and warm answers are the same bits
  forebay store verify /ssd/kv                  every byte of the SSD tier is as it was written
  forebay shapes k3.1-pro                       what a model's cache and state weigh
"""
PURGE_EPILOG = """\
examples:
  forebay store purge /ssd/kv --session build-42    what only this session has used
  forebay store purge /ssd/kv --tenant acme         all that was sent with cache_salt "acme"

Stop the endpoint first: a log in use is refused. While it runs, DELETE /v1/sessions/NAME does the same to memory and
SSD where [store] purge_ended is set. Interrupted, it can be run again. The bytes become zeros and their room is given
back to the disk; `forebay store gc` then makes the files shorter. A cluster-wide pool is not touched.
"""


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words[:1] == ["replay"]:
            return _replay(words[1:])
        args = make_parser().parse_args(words)
        return int(args.verb(args))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone
        sys.stderr.close()
        return 141


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="forebay",
        description="Serves Kimi-K3-family models to agents: a router, and clusters of prefill and decode workers.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"forebay {version('forebay')}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for add in (
        _add_up,
        _add_status,
        _add_chat,
        _add_route,
        _add_shapes,
        _add_config,
        _add_check,
        _add_store,
        _add_replay,
        _add_bench,
    ):
        add(verbs)
    return parser


def _add(verbs: Any, name: str, verb: Any, help_text: str, **more: Any) -> argparse.ArgumentParser:
    added: argparse.ArgumentParser = verbs.add_parser(name, help=help_text, description=help_text, **more)
    added.set_defaults(verb=verb)
    return added


def _add_up(verbs: Any) -> None:
    up = _add(verbs, "up", _up, "Start an endpoint in the foreground; Ctrl-C drains it and ends everything it started.")
    _add_endpoint_flags(up)


def _add_endpoint_flags(parser: argparse.ArgumentParser) -> None:
    """Every flag is a key of the file as well; flags go before the file."""
    unset = argparse.SUPPRESS
    add = parser.add_argument
    add("config", nargs="?", type=Path, metavar="CONFIG.toml", help="the configuration file")
    add("--model", default=unset, metavar="DIR|NAME", help="a model folder, demo (the default), or demo-random")
    add("--served-model-name", default=unset, metavar="NAME", help="what clients call it (default: the folder's name)")
    add("--clusters", type=int, default=unset, metavar="N", help="clusters in this Ray instance (default 2)")
    add(
        "--prefill",
        default=unset,
        metavar="N|A:B",
        help="prefill workers a cluster, or a range to scale in (default 1)",
    )
    add("--decode", default=unset, metavar="N|A:B", help="decode workers a cluster, or a range to scale in (default 1)")
    add("--host", default=unset, metavar="H", help="address of the router (default 127.0.0.1)")
    add("--port", type=int, default=unset, metavar="P", help="port of the router (default 8000); ingresses follow it")
    add("--ingress-port", type=int, default=unset, metavar="P", help="port of the first ingress (default: port + 1)")
    add(
        "--store",
        dest="store.pool",
        default=unset,
        metavar="mooncake[://H:P]",
        help="a cluster-wide tier below the others: a Mooncake Store of its own, or the one with this master",
    )
    add(
        "--run-dir",
        default=unset,
        metavar="DIR",
        help="the run folder (default: one for each port, in the temp folder)",
    )


def _endpoint_config(args: argparse.Namespace) -> Any:
    """The configuration, or None after saying on stderr what is wrong with it."""
    from forebay.cluster.config_file import ConfigError, load

    flags = {key: value for key, value in vars(args).items() if key not in ("config", "verb")}
    try:
        return load(args.config, flags)
    except ConfigError as error:
        for fault in error.faults:
            print(f"forebay: {fault}", file=sys.stderr)
        return None


def _up(args: argparse.Namespace) -> int:
    config = _endpoint_config(args)
    if config is None:
        return 2
    from forebay.cluster.launch import up

    return up(config)


def _add_status(verbs: Any) -> None:
    status = _add(verbs, "status", _status, "Show clusters and workers of a running endpoint.")
    status.add_argument("--url", default=DEFAULT_URL, help=f"the endpoint (default {DEFAULT_URL})")
    status.add_argument("--json", action="store_true", help="print JSON")


def _status(args: argparse.Namespace) -> int:
    from forebay.cluster.status import status

    return status(args.url, args.json)


def _add_chat(verbs: Any) -> None:
    chat = _add(verbs, "chat", _chat, "Talk to a running endpoint; an empty line or Ctrl-D ends.")
    chat.add_argument("--url", default=DEFAULT_URL, help=f"the endpoint (default {DEFAULT_URL})")
    chat.add_argument("--model", help="model name (default: the first that the endpoint lists)")
    chat.add_argument("--max-tokens", type=int, default=256, help="tokens of an answer at most (default 256)")
    chat.add_argument("--api-key", default="none", help="sent as a bearer token")


def _chat(args: argparse.Namespace) -> int:
    from forebay.cluster.chat import chat

    return chat(args.url, args.model, args.max_tokens, args.api_key)


def _add_route(verbs: Any) -> None:
    route = _add(verbs, "route", _route, "Print primary and backup cluster of a session key.")
    route.add_argument("key", help="the session key, as a client sends it in x-session-id")
    route.add_argument("config_file", nargs="?", type=Path, metavar="CONFIG.toml", help="the endpoint's configuration")
    route.add_argument("--clusters", type=int, default=argparse.SUPPRESS, metavar="N", help="clusters (default 2)")


def _route(args: argparse.Namespace) -> int:
    flags = {"clusters": args.clusters} if "clusters" in args else {}
    config = _endpoint_config(argparse.Namespace(config=args.config_file, **flags))
    if config is None:
        return 2
    from forebay.cluster.route import route

    return route(config, args.key)


def _add_shapes(verbs: Any) -> None:
    shapes = _add(verbs, "shapes", _shapes, "Print what a model shape weighs: layers, states, cache, pages, FLOPs.")
    shapes.add_argument("name", help="a released shape (k3.1-pro, k3, kimi-linear-48b, k3.1-slice) or a model folder")


def _shapes(args: argparse.Namespace) -> int:
    from forebay.cluster.shapes import shapes

    return shapes(args.name)


def _add_config(verbs: Any) -> None:
    config = verbs.add_parser("config", help="Check a configuration.").add_subparsers(metavar="check", required=True)
    check = _add(config, "check", _config_check, "Print the whole configuration, or name the keys that are wrong.")
    _add_endpoint_flags(check)


def _config_check(args: argparse.Namespace) -> int:
    config = _endpoint_config(args)
    if config is None:
        return 1
    from forebay.cluster.config_file import show

    print("\n".join(show(config)))
    return 0


def _add_check(verbs: Any) -> None:
    check = verbs.add_parser("check", help="Check operators and the store's exactness.")
    checks = check.add_subparsers(metavar="WHAT", required=True)
    golden = _add(checks, "golden", _check_golden, "Compare with golden data: every case, its error and tolerance.")
    golden.add_argument("folder", type=Path, metavar="DIR", help="a folder of golden sets")
    _add_device(golden, "where the models run")
    resume = _add(checks, "resume", _check_resume, "Cold and warm answers must be the same bits.")
    resume.add_argument("--model", default="demo", metavar="DIR|NAME", help="default demo")
    _add_device(resume, "where the workers compute")
    resume.add_argument("--plant", choices=("flip", "skip-kda", "short-index"), help="damage restored state: must fail")
    resume.add_argument(
        "--tier",
        choices=("hbm", "dram", "ssd", "mooncake"),
        help="through one tier only (default: through each but mooncake, which starts a Mooncake master)",
    )
    resume.add_argument(
        "--transfer",
        choices=("shared_memory", "mooncake"),
        default="shared_memory",
        help="how prefill hands over to decode (default shared_memory)",
    )
    model = _add(checks, "model", _check_model, "What the built-in model can do, at a running endpoint that serves it.")
    model.add_argument("--url", default=DEFAULT_URL, help=f"the endpoint (default {DEFAULT_URL})")
    model.add_argument("--thinking", action="store_true", help="ask with thinking on (default: off)")
    model.add_argument("--python-docs", type=Path, metavar="DIR", help="Debian's python3.11-doc, for the text criteria")


def _add_device(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--device", default="cpu", metavar="D", help=f"{what}: cpu (the default) or cuda")


def _check_golden(args: argparse.Namespace) -> int:
    from forebay.cluster.check import check_golden

    return check_golden(args.folder, args.device)


def _check_resume(args: argparse.Namespace) -> int:
    from forebay.cluster.check import check_resume

    return check_resume(args.model, args.plant, args.tier, args.transfer, args.device)


def _check_model(args: argparse.Namespace) -> int:
    from forebay.cluster.check_model import check_model

    return check_model(f"{args.url}/v1", "demo", args.thinking, args.python_docs)


def _add_store(verbs: Any) -> None:
    store = verbs.add_parser("store", help="Look at the SSD tier's files, verify them, give space back.")
    acts = store.add_subparsers(metavar="WHAT", required=True)
    texts = {
        "ls": "List segments, a line each.",
        "inspect": "List records, a line each: group, tokens, key, model.",
        "verify": "Read and check every byte; status 1 where something is not whole.",
        "gc": "Drop what can never be hit: damaged, doubled, incomplete, erased, of another format version.",
        "purge": "Erase for good what one session alone has stored, or one tenant. What several sessions use stays.",
    }
    for name, text in texts.items():
        act = _add(acts, name, _store, text)
        act.set_defaults(act=name)
        act.add_argument("path", type=Path, metavar="PATH", help="ssd_path of the configuration, or one slot below it")
        act.add_argument("--json", action="store_true", help="print JSON")
        if name == "gc":
            act.add_argument("--keep-bytes", type=int, metavar="N", help="and the oldest segments beyond N bytes a log")
        if name == "purge":
            act.epilog, act.formatter_class = PURGE_EPILOG, argparse.RawDescriptionHelpFormatter
            whose = act.add_mutually_exclusive_group(required=True)
            whose.add_argument("--session", metavar="NAME", help="the client's name of the session, or its key in logs")
            whose.add_argument("--tenant", metavar="SALT", help="the tenant's cache_salt; '' is who sent none")


def _store(args: argparse.Namespace) -> int:
    from forebay.cluster import store_verbs

    if args.act == "gc":
        return store_verbs.store_gc(args.path, args.keep_bytes, args.json)
    if args.act == "purge":
        return store_verbs.store_purge(args.path, args.session, args.tenant, args.json)
    verbs = {"ls": store_verbs.store_ls, "inspect": store_verbs.store_inspect, "verify": store_verbs.store_verify}
    return verbs[args.act](args.path, args.json)


def _add_replay(verbs: Any) -> None:
    """Listed only: its flags are the client's own, and that client is imported when it is called."""
    verbs.add_parser("replay", help="Replay a Mooncake trace against an endpoint, session order kept.")


def _replay(argv: Sequence[str]) -> int:
    from forebay.ops.replay_cli import main as replay

    return replay(argv)


def _add_bench(verbs: Any) -> None:
    bench = verbs.add_parser("bench", help="Measure.").add_subparsers(metavar="WHAT", required=True)
    demo = _add(bench, "demo", _bench_demo, "Time to first token, prefill and decode rates of one pair of workers.")
    demo.add_argument("--model", default="demo", metavar="DIR|NAME", help="default demo")
    demo.add_argument("--threads", type=int, default=1, help="torch threads of each worker (default 1)")
    demo.add_argument("--json", type=Path, metavar="F", help="write the rows to this file as well")
    classes = _add(bench, "classes", _bench_classes, "What a flood of one class costs another, at a running endpoint.")
    classes.add_argument("--url", default=DEFAULT_URL, help=f"the endpoint (default {DEFAULT_URL})")
    classes.add_argument("--requests", type=int, default=100, metavar="N", help="interactive requests (default 100)")
    classes.add_argument("--json", type=Path, metavar="F", help="write the rows to this file as well")
    _add_bench_kernels(bench)
    _add_bench_engine(bench)
    index = _add(bench, "index", _bench_index, "Hit rates of the store's index on a recorded trace, without a model.")
    _add_bench_index_flags(index)


def _add_bench_kernels(bench: Any) -> None:
    from forebay.kernels.bench import add_arguments

    add_arguments(_add(bench, "kernels", _bench_kernels, "The kernels on this GPU, beside public ones and the floor."))

    store = _add(bench, "store", _bench_store, "The store's tiers beside plain memory and plain files, as ratios.")
    store.add_argument("--folder", type=Path, metavar="DIR", help="on the disk to measure (default: the temp folder)")
    store.add_argument("--json", type=Path, metavar="F", help="write the rows to this file as well")


def _bench_store(args: argparse.Namespace) -> int:
    from forebay.cluster.bench import bench_store

    return bench_store(args.folder, args.json)


def _add_bench_engine(bench: Any) -> None:
    from forebay.workers.bench_engine import add_arguments

    add_arguments(_add(bench, "engine", _bench_engine, "One model on one device: decode, prefill, start."))


def _bench_engine(args: argparse.Namespace) -> int:
    from forebay.workers.bench_engine import run

    return run(args)


def _add_bench_index_flags(parser: argparse.ArgumentParser) -> None:
    from forebay.cluster.bench_index_flags import add_arguments

    add_arguments(parser)


def _bench_index(args: argparse.Namespace) -> int:
    from forebay.cluster.bench_index_flags import run

    return run(args)


def _bench_demo(args: argparse.Namespace) -> int:
    from forebay.cluster.bench import bench_demo

    return bench_demo(args.model, args.threads, args.json)


def _bench_classes(args: argparse.Namespace) -> int:
    from forebay.cluster.bench import bench_classes

    return bench_classes(args.url, args.requests, args.json)


def _bench_kernels(args: argparse.Namespace) -> int:
    from forebay.kernels.bench import run

    return run(args)

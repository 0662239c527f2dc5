"""`forebay up`: starts Ray, the clusters and the router, says what happens meanwhile, and ends all that it started.

    lock and sweep the run folder -> ports, memory, model -> Ray -> ingresses, pools -> router -> drain -> kill

The router lives in this process. A first SIGINT or SIGTERM drains it for at most 5 s; a second one, or one that comes
while starting, ends everything at once. Whatever a kill -9 leaves behind, the next `up` sweeps.
"""

import contextlib
import os
import secrets
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from forebay.cluster.config import KINDS, EndpointConfig, of_cluster, router_config, worker_config
from forebay.cluster.model_facts import FactsReader, ModelError, ModelFacts
from forebay.cluster.pool import Pool, pool
from forebay.cluster.rundir import RunDir, RunDirTaken
from forebay.cluster.start_checks import (
    StartError,
    bind,
    check_memory,
    check_model,
    check_mooncake,
    check_pools,
    check_ports,
    check_run_dir,
)
from forebay.cluster.supervise import supervised
from forebay.router.config import ModelConfig

READY_S = 180.0

Say = Callable[[str], None]


class Stopped(BaseException):
    """A signal came while starting."""


def up(config: EndpointConfig) -> NoReturn:
    """Runs until it is told to stop, then ends the process. Errors are one line on stderr."""
    status = _up(config)
    sys.stdout.flush()
    sys.stderr.flush()
    # Ray's exit handlers would wait for the processes that have just been ended.
    os._exit(status)


def _up(config: EndpointConfig) -> int:
    started = time.monotonic()
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:5.1f} s] {text}", flush=True)

    try:
        check_run_dir(config)
        check_model(config)
        with RunDir(config.run_path) as run:
            return _run(config, run, say)
    except Stopped:
        print("forebay: stopped before it was ready", file=sys.stderr)
        return 130
    except RunDirTaken as error:
        return _fail(f"{error}: stop it, or choose another --port (and run_dir)")
    except (StartError, ModelError, OSError) as error:
        return _fail(str(error))
    except Exception as error:
        where = _keep_trace(config)
        return _fail(f"internal error: {type(error).__name__}: {_first_line(error)} (details in {where})")


def _fail(text: str) -> int:
    print(f"forebay: {text}", file=sys.stderr)
    return 1


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


def _keep_trace(config: EndpointConfig) -> Path:
    path = config.run_path.with_suffix(".error")
    path.write_text(traceback.format_exc())
    return path


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped


def _run(config: EndpointConfig, run: RunDir, say: Say) -> int:
    swept = run.sweep()
    if swept.processes or swept.files:
        say(f"swept what a killed endpoint left: {swept.processes} processes, {swept.files} files")
    door = bind(config.host, config.port, "--port")
    check_ports(config)
    check_mooncake(config)
    check_memory(config, weight_bytes=0)
    memory = run.make_memory(config.arena_bytes)
    run.publish(_endpoint(config, run, "starting"))
    with contextlib.closing(door), supervised(run), pool(config, run.path, say) as store:
        config = store.config
        say(f"model {config.model}: reading")
        reader = FactsReader(config.model, worker_config(config, "decode", "").block_tokens)
        address = _start_ray(config, run, say)
        facts = reader.wait()
        check_pools(config, facts.least_bytes)
        check_memory(config, facts.weight_bytes)
        say(f"model {config.model}: {facts.folder}")
        _start_clusters(replace(config, model=facts.folder), str(memory), say)
        return _serve(store, run, facts, door, say, address)


def _start_ray(config: EndpointConfig, run: RunDir, say: Say) -> str:
    _set_ray_environment(run)
    from forebay.cluster import actors

    address = actors.start_ray(run.path / "ray", config.object_store_bytes)
    # Ray has put its own handlers in their place, which exit in the middle of whatever runs.
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    say("Ray is up")
    return address


def _set_ray_environment(run: RunDir) -> None:
    """Read by Ray when it is imported, and by all its processes: there is no other way to say these."""
    # A Ray that no other machine can reach: all its sockets are on loopback.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    # A secret of this endpoint alone, in place of one in the home folder that all of a user's clusters share.
    token = run.path / "ray_token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN_PATH"] = "token", str(token)


def _start_clusters(config: EndpointConfig, memory: str, say: Say) -> None:
    from forebay.cluster import actors

    for name, port in zip(config.cluster_names, config.ingress_ports, strict=True):
        actors.start_ingress(name, "127.0.0.1", port)
    actors.start_pools([_pool(config, cluster, kind, memory) for cluster in config.cluster_names for kind in KINDS])
    say(f"starting {config.clusters} clusters of {config.prefill} + {config.decode} workers (prefill + decode)")
    _wait_ready(config, say)


def _pool(config: EndpointConfig, cluster: str, kind: Any, memory: str) -> Any:
    from forebay.cluster import actors, makers

    worker, replicas = of_cluster(worker_config(config, kind, memory), cluster), config.replicas(kind)
    return actors.Pool(
        cluster=cluster,
        kind=kind,
        make=partial(makers.MAKERS[kind], worker),
        replicas_min=replicas.least,
        replicas_max=replicas.most,
        jobs_per_worker=0.75 * worker.slots if kind == "decode" else 2.0,
    )


def _wait_ready(config: EndpointConfig, say: Say) -> None:
    from forebay.cluster import actors
    from forebay.cluster.status import ingress_status

    until, before = time.monotonic() + READY_S, ""
    while time.monotonic() < until:
        found = [ingress_status(port) for port in config.ingress_ports]
        lines = [_workers_line(name, status, config) for name, status in zip(config.cluster_names, found, strict=True)]
        if (line := ", ".join(lines)) != before:
            say(line)
            before = line
        if all(_complete(status, config) for status in found):
            return
        if faults := actors.pool_faults():
            raise StartError("; ".join(f"{name}: {fault}" for name, fault in faults.items()))
        time.sleep(0.2)
    raise StartError(f"not ready in {READY_S:.0f} s: {before}")


def _count(status: dict[str, Any] | None, kind: str) -> int:
    return sum(worker["kind"] == kind for worker in status["workers"]) if status else 0


def _complete(status: dict[str, Any] | None, config: EndpointConfig) -> bool:
    return all(_count(status, kind) >= config.replicas(kind).least for kind in KINDS)


def _workers_line(name: str, status: dict[str, Any] | None, config: EndpointConfig) -> str:
    counts = [f"{kind} {_count(status, kind)}/{config.replicas(kind).least}" for kind in KINDS]
    return f"{name}: " + " ".join(counts)


def _serve(store: Pool, run: RunDir, facts: ModelFacts, door: socket.socket, say: Say, ray_address: str) -> int:
    from forebay.router.main import serve

    config = store.config
    model = ModelConfig(
        name=config.model_name,
        aliases=config.aliases,
        folder=facts.folder,
        context_tokens=facts.context_tokens,
        block_tokens=facts.block_tokens,
        token_bytes=facts.token_bytes,
        state_bytes=facts.state_bytes,
        thinking=config.thinking,
        temperature=facts.temperature,
        top_p=facts.top_p,
    )

    def ready() -> None:
        run.publish(_endpoint(config, run, "ready") | {"ray": ray_address})
        say("ready\n" + _welcome(config))

    status = serve(router_config(config, model), door, ready, store.about)
    say("drained, ending all processes")
    return status


def _welcome(config: EndpointConfig) -> str:
    url = f"http://{config.host}:{config.port}"
    body = f'{{"model": "{config.model_name}", "messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 64}}'
    return (
        f"\n  {url}/v1   an OpenAI-compatible endpoint; model {config.model_name}\n\n"
        f"  curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'\n\n"
        f"  forebay chat --url {url}      forebay status --url {url}      Ctrl-C stops\n"
    )


def _endpoint(config: EndpointConfig, run: RunDir, state: str) -> dict[str, Any]:
    return {
        "state": state,
        "pid": os.getpid(),
        "url": f"http://{config.host}:{config.port}",
        "model": config.model_name,
        "memory": str(run.memory),
        "ingresses": dict(zip(config.cluster_names, config.ingress_ports, strict=True)),
    }

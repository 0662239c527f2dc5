"""Plain classes made remote: Ray's start, the pools as Serve deployments, the ingresses as actors of their own.

A worker is built by `make(name)` in its own process. Serve gives each pool lifecycle, health, draining and scaling;
Serve's HTTP proxy is off, since behind it all clusters would share one process.
"""

import asyncio
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import uvicorn
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from forebay.cluster.beat import Beat, Kind
from forebay.cluster.ingress import Ingress
from forebay.cluster.ingress_http import make_app
from forebay.cluster.serve_calls import ServeCalls, app_name
from forebay.cluster.serve_workers import NAMESPACE, Make, ServeDecode, ServePrefill, ingress_name
from forebay.workers.job import Holder

MANY = 10_000
"""Serve must never queue a call: the workers own their slots and queues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """One kind of worker of one cluster. `replicas_max` above `replicas_min` turns Serve's autoscaling on."""

    cluster: str
    kind: Kind
    make: Make
    replicas_min: int
    replicas_max: int
    jobs_per_worker: float
    """How many jobs a worker should have on average when Serve scales the pool."""


class IngressActor:
    """A cluster's ingress with its web server, both in the actor's event loop."""

    async def __init__(self, cluster: str, host: str, port: int) -> None:  # type: ignore[misc]  # Ray awaits it
        self._ingress = Ingress(cluster, ServeCalls(cluster))
        config = uvicorn.Config(
            make_app(self._ingress), host=host, port=port, log_level="error", access_log=False, lifespan="off"
        )
        self._tasks = [asyncio.create_task(self._ingress.watch()), asyncio.create_task(uvicorn.Server(config).serve())]
        for task in self._tasks:
            task.add_done_callback(_die_with)

    async def beat(self, beat: Beat) -> Holder:
        return self._ingress.beat(beat)


def _die_with(task: "asyncio.Task[None]") -> None:
    """An ingress without its server or its watch is none: Ray starts another."""
    if not task.cancelled():
        os._exit(70)


def start_ray(folder: Path, object_store_bytes: int) -> str:
    """One Ray instance on loopback, all its files in `folder`, nothing printed. Returns its address."""
    context: Any = ray.init(
        num_cpus=os.cpu_count(),
        include_dashboard=False,
        object_store_memory=object_store_bytes,
        log_to_driver=False,
        logging_level=logging.ERROR,
        namespace=NAMESPACE,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(folder),
        _system_config={"worker_niceness": 0},  # Ray's own 15 starves workers beside a busy router on the same cores
    )
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR", "enable_access_log": False})
    return str(context.address_info["address"])


def start_ingress(cluster: str, host: str, port: int) -> Any:
    """Comes back by itself, on the same port, when it dies."""
    ray_remote: Any = ray.remote
    remote = ray_remote(num_cpus=0, max_restarts=-1, max_task_retries=0, max_concurrency=MANY)(IngressActor)
    return remote.options(name=ingress_name(cluster), lifetime="detached", get_if_exists=False).remote(
        cluster, host, port
    )


def start_pools(pools: list[Pool]) -> None:
    """All at the same time; returns before they are ready."""
    targets = [
        serve.RunTarget(_application(pool), name=app_name(pool.cluster, pool.kind), route_prefix=None) for pool in pools
    ]
    serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def pool_faults() -> dict[str, str]:
    """Why workers did not start, one line a pool. Serve tries again and again; the first failure is told."""
    faults = {}
    for name, app in serve.status().applications.items():
        messages = [each.message for each in app.deployments.values()]
        if failed := [text for text in messages if "failed to start" in text]:
            faults[name] = failed[0].strip().splitlines()[-1]
        elif app.status == "DEPLOY_FAILED":
            faults[name] = app.message
    return faults


def _ingress_name(cluster: str) -> str:
    return f"{cluster}-ingress"


def _application(pool: Pool) -> Any:
    scaling: dict[str, Any] = {"num_replicas": pool.replicas_min}
    if pool.replicas_max > pool.replicas_min:
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=pool.replicas_min,
                max_replicas=pool.replicas_max,
                target_ongoing_requests=pool.jobs_per_worker,
                metrics_interval_s=1.0,
                look_back_period_s=5.0,
                upscale_delay_s=3.0,
                downscale_delay_s=60.0,
            )
        }
    router: Any = "forebay.cluster.pin:PinRouter"  # Serve takes a path too, whatever its annotation says
    deployment: Any = serve.deployment(
        {"prefill": ServePrefill, "decode": ServeDecode}[pool.kind],
        name=pool.kind,
        max_ongoing_requests=MANY,
        health_check_period_s=1.0,
        health_check_timeout_s=3.0,
        graceful_shutdown_timeout_s=30.0,
        graceful_shutdown_wait_loop_s=0.2,
        ray_actor_options={"num_cpus": 0},
        request_router_config=RequestRouterConfig(request_router_class=router),
        **scaling,
    )
    return deployment.bind(pool.cluster, pool.make)

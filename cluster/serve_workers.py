"""The two deployments: a replica of Ray Serve around a `replicas.Replica`, which does the work."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import ray
from ray import serve

from forebay.cluster.beat import Beat
from forebay.cluster.messages import StreamItem
from forebay.router.wire import Stop
from forebay.workers.job import Holder, Job

NAMESPACE = "forebay"

Make = Callable[[str], Any]
"""Builds a worker in its own process, given its name."""


def ingress_name(cluster: str) -> str:
    return f"{cluster}-ingress"


class ServeWorker:
    """Who the replica is, how it beats, and its health. The worker is built apart from the loop that answers Serve."""

    async def __init__(self, cluster: str, make: Make) -> None:  # type: ignore[misc]  # Serve and Ray await it
        name = serve.get_replica_context().replica_id.unique_id
        node = ray.get_runtime_context().get_node_id()
        worker = await asyncio.to_thread(make, name)
        self.replica = self._wrap(name, node, worker, _beat_sender(cluster))

    def _wrap(self, *parts: Any) -> Any:
        raise NotImplementedError

    def check_health(self) -> None:
        self.replica.check_health()

    async def end(self, job_id: str, *, to: str) -> None:
        await self.replica.end(job_id, to)


class ServePrefill(ServeWorker):
    def _wrap(self, *parts: Any) -> Any:
        # Here and not above: the process that only deploys this needs no torch.
        from forebay.cluster.replicas import PrefillReplica

        return PrefillReplica(*parts)

    async def prefill(self, job: Job, holder: Holder, *, to: str) -> Any:
        return await self.replica.prefill(job, holder, to)

    async def end_session(self, session: str, *, to: str) -> None:
        await self.replica.end_session(session, to)

    async def turn_ended(self, session: str, stop: Stop, *, to: str) -> None:
        await self.replica.turn_ended(session, stop, to)


class ServeDecode(ServeWorker):
    def _wrap(self, *parts: Any) -> Any:
        from forebay.cluster.replicas import DecodeReplica

        return DecodeReplica(*parts)

    async def reserve(self, job_id: str, holder: Holder, n_tokens: int, *, to: str) -> Any:
        return await self.replica.reserve(job_id, holder, n_tokens, to)

    async def start(self, job: Job, prefilled: Any, holder: Holder, stream: str, *, to: str) -> Any:
        return await self.replica.start(job, prefilled, holder, stream, to)

    async def events(self, holder: Holder, stream: str, *, to: str) -> AsyncGenerator[StreamItem]:
        async with aclosing(self.replica.events(holder, stream, to)) as items:
            async for events in items:
                yield events


def _beat_sender(cluster: str) -> Callable[[Beat], Any]:
    ingress = ray.get_actor(ingress_name(cluster), namespace=NAMESPACE)
    return lambda beat: ingress.beat.remote(beat)

"""Asks every cluster's /ready all the time and feeds the answers to Liveness; cuts what is open to one that hangs."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from forebay.router.ingress_client import IngressClient
from forebay.router.liveness import Liveness


@asynccontextmanager
async def probing(
    client: IngressClient, liveness: Liveness, clusters: list[str], every_s: float
) -> AsyncIterator[None]:
    """Probe while the context is open, once before it opens. Each cluster has a loop of its own: a slow one delays no
    other's."""
    await asyncio.gather(*(_probe(client, liveness, cluster) for cluster in clusters))
    async with asyncio.TaskGroup() as group:
        loops = [group.create_task(_probe_for_ever(client, liveness, cluster, every_s)) for cluster in clusters]
        try:
            yield
        finally:
            for each in loops:
                each.cancel()


async def _probe_for_ever(client: IngressClient, liveness: Liveness, cluster: str, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        await _probe(client, liveness, cluster)


async def _probe(client: IngressClient, liveness: Liveness, cluster: str) -> None:
    probe = await client.probe(cluster)
    now = time.monotonic()
    liveness.observe(cluster, probe, now)
    if cluster in liveness.hung(now):
        client.cut(cluster)

"""The jobs of one request in one cluster, as one stream of frames.

Jobs come in groups that share a prompt (the n choices). The first of a group prefills alone; the others start when it
has, so they find its blocks instead of computing them again.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

from forebay.router.ingress_client import ClusterLost, IngressClient, JobRefused
from forebay.router.wire import Finished, Frame, JobRequest, Started

QUEUED_FRAMES = 64  # a client that reads slowly slows its jobs down instead of filling the router's memory


class FanOut:
    """Open only through `fan_out`."""

    def __init__(self, client: IngressClient, cluster: str, groups: Sequence[Sequence[JobRequest]]) -> None:
        self._client = client
        self._cluster = cluster
        self._queue: asyncio.Queue[tuple[int, Frame | Exception]] = asyncio.Queue(QUEUED_FRAMES)
        self._tasks: list[asyncio.Task[None]] = []
        for group in groups:
            prefilled = asyncio.Event()
            for place, job in enumerate(group):
                run = self._run(len(self._tasks), job, prefilled, first=place == 0)
                self._tasks.append(asyncio.create_task(run))
        self._unfinished = set(range(len(self._tasks)))

    async def frames(self) -> AsyncGenerator[tuple[int, Frame], None]:
        """(index of the job, frame), each job's in order, until every job has finished or was stopped.

        Raises what the first failing job failed with.
        """
        while self._unfinished:
            index, item = await self._queue.get()
            if index not in self._unfinished:
                continue
            if isinstance(item, Exception):
                raise item
            if isinstance(item, Finished):
                self._unfinished.discard(index)
            yield index, item

    def stop(self, index: int) -> None:
        """The job's answer is complete: cancel what the cluster still does for it."""
        self._unfinished.discard(index)
        self._tasks[index].cancel()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, index: int, job: JobRequest, prefilled: asyncio.Event, *, first: bool) -> None:
        if not first:
            await prefilled.wait()
        try:
            async with self._client.open_job(self._cluster, job) as frames:
                async for frame in frames:
                    if isinstance(frame, Started):
                        prefilled.set()
                    await self._queue.put((index, frame))
        except (JobRefused, ClusterLost) as error:
            await self._queue.put((index, error))
        except Exception as error:  # a fault of ours must end the request, not leave it waiting for frames
            await self._queue.put((index, error))
            raise


@asynccontextmanager
async def fan_out(
    client: IngressClient, cluster: str, groups: Sequence[Sequence[JobRequest]]
) -> AsyncIterator[tuple[FanOut, AsyncIterator[tuple[int, Frame]]]]:
    """Run the jobs. Leaving the context cancels those that have not finished."""
    jobs = FanOut(client, cluster, groups)
    try:
        async with aclosing(jobs.frames()) as frames:
            yield jobs, frames
    finally:
        await jobs.close()

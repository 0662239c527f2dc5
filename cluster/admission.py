"""Who gets a decode slot next: a bounded queue by priority, then deadline, then arrival.

A slot is promised to a job before its prefill starts, so a finished prompt never waits for one.
"""

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from forebay.cluster.dispatch import NoWorker, choose_decode
from forebay.cluster.registry import Registry
from forebay.workers.job import Failure


@dataclass(order=True, slots=True)
class _Waiter:
    priority: int
    deadline: float
    arrival: int
    job_id: str = field(compare=False)
    future: "asyncio.Future[str]" = field(compare=False)


class Admission:
    """`wake` is to be called whenever a slot may have become free: at a beat, and when a job leaves a worker."""

    def __init__(self, registry: Registry, queue_jobs: int, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._queue_jobs = queue_jobs
        self._clock = clock
        self._arrivals = itertools.count()
        self._waiters: list[_Waiter] = []

    def __len__(self) -> int:
        return len(self._waiters)

    async def take(
        self, job_id: str, *, priority: int, timeout_s: float, patience_s: float
    ) -> str | Failure | NoWorker:
        """A decode worker with a free slot, where `job_id` is counted from now on until `give_back`.

        Waits at most `timeout_s` while workers live but are full, and at most `patience_s` while none lives.
        """
        if patience_s == 0.0 and not self._registry.alive("decode", self._clock()):
            return NoWorker(kind="decode")
        if len(self) >= self._queue_jobs:
            return Failure(job_id=job_id, kind="overloaded", message=f"{self._queue_jobs} jobs wait for a slot")
        deadline = self._clock() + timeout_s
        waiter = _Waiter(priority, deadline, next(self._arrivals), job_id, asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiters, waiter)
        self.wake()
        try:
            return await self._wait(waiter, patience_s)
        except asyncio.CancelledError:
            if waiter.future.done():
                self.give_back(waiter.future.result(), job_id)
            raise
        finally:
            if not waiter.future.done():
                self._waiters.remove(waiter)
                heapq.heapify(self._waiters)

    async def _wait(self, waiter: _Waiter, patience_s: float) -> str | Failure | NoWorker:
        alone_since: float | None = None
        while True:
            done, _ = await asyncio.wait([waiter.future], timeout=0.25)
            now = self._clock()
            if done:
                return waiter.future.result()
            if now >= waiter.deadline:
                return Failure(job_id=waiter.job_id, kind="deadline", message="no decode slot before the deadline")
            if self._registry.alive("decode", now):
                alone_since = None
            elif now - (alone_since := alone_since if alone_since is not None else now) >= patience_s:
                return NoWorker(kind="decode")

    def give_back(self, worker: str, job_id: str) -> None:
        if worker in self._registry:
            entry = self._registry[worker]
            entry.jobs.discard(job_id)
            entry.full = False
        self.wake()

    def refused(self, worker: str, job_id: str) -> None:
        """The worker itself said that it is full: nobody is sent there until it beats again, or a job ends on it."""
        if worker in self._registry:
            self._registry[worker].jobs.discard(job_id)
            self._registry[worker].full = True

    def wake(self) -> None:
        """Serves those in front as long as a slot is free."""
        while self._waiters:
            worker = choose_decode(self._registry.live("decode", self._clock()))
            if worker is None:
                return
            waiter = heapq.heappop(self._waiters)
            self._registry[worker].jobs.add(waiter.job_id)
            waiter.future.set_result(worker)

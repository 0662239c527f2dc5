"""A cluster's door: it takes jobs in token ids and sees each through. Knows neither HTTP nor Ray.

It is restarted when it dies, with a new epoch; its workers learn that from their next beat and free what the old one
held. It keeps nothing that must survive: workers register themselves by beating.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from forebay.cluster.admission import Admission
from forebay.cluster.beat import Beat, Kind
from forebay.cluster.calls import Calls
from forebay.cluster.counts import Counts
from forebay.cluster.dispatch import Lost
from forebay.cluster.house import Background, House, Watchers
from forebay.cluster.jobs import JobRun
from forebay.cluster.placement import Placement
from forebay.cluster.registry import SILENT_S, Entry, Registry
from forebay.cluster.status_form import worker_status
from forebay.cluster.streams import Streams
from forebay.router.wire import Failed, Frame, JobRequest, Stop
from forebay.workers.job import Holder

QUEUE_JOBS = 256
OPEN_JOBS = 2048
SESSIONS = 100_000
TICK_S = 0.25


class Ingress:
    def __init__(self, cluster: str, calls: Calls, clock: Callable[[], float] = time.monotonic) -> None:
        # Epochs only ever grow on one machine: the clock counts from its boot.
        self.cluster = cluster
        self.holder = Holder(name=f"{cluster}-ingress", epoch=time.monotonic_ns())
        registry = Registry()
        self._house = House(
            holder=self.holder,
            calls=calls,
            registry=registry,
            admission=Admission(registry, QUEUE_JOBS, clock),
            streams=Streams(calls, self.holder),
            placement=Placement(SESSIONS),
            watchers=Watchers(),
            background=Background(),
            counts=Counts(),
            clock=clock,
        )

    def beat(self, beat: Beat) -> Holder:
        """Registers the worker, takes what it reports, and says who holds its slots."""
        self._house.registry.beat(beat, self._house.clock())
        self._house.admission.wake()
        return self.holder

    async def watch(self) -> None:
        """Tells the jobs of a worker that fell silent or hangs. Runs as long as the ingress does."""
        while True:
            for worker, reason in self._house.registry.bury(self._house.clock()):
                self._house.watchers.tell(Lost(worker=worker, reason=reason))
            await asyncio.sleep(TICK_S)

    def workers(self) -> dict[str, Entry]:
        """The workers that beat, as they said last."""
        now = self._house.clock()
        return {name: entry for name, entry in self._house.registry.all.items() if now - entry.beat_at < SILENT_S}

    def restarts(self, kind: Kind) -> int:
        return self._house.registry.restarts[kind]

    @property
    def counts(self) -> Counts:
        return self._house.counts

    @property
    def ready(self) -> bool:
        now = self._house.clock()
        return all(self._house.registry.alive(kind, now) for kind in ("prefill", "decode"))

    def refusal(self) -> Failed | None:
        """Why no job is taken now, before it is even read."""
        if not self.ready:
            return Failed(kind="no_workers", message=f"cluster {self.cluster} has no live workers", retry_after_s=5.0)
        if self._house.counts.open_jobs >= OPEN_JOBS:
            return Failed(kind="overloaded", message=f"{OPEN_JOBS} jobs are open", retry_after_s=1.0)
        return None

    async def run(self, request: JobRequest, emit: Callable[[Frame], None]) -> None:
        """Sees one job through; `emit` takes its frames. Cancelled, it frees all that the job holds."""
        with self._counted():
            await JobRun(self._house, request, emit).run()

    def end_session(self, session: str) -> None:
        """Every prefill worker is told: the session may have moved. Nobody waits for that."""
        house = self._house
        for worker, entry in self.workers().items():
            if entry.beat.kind == "prefill" and len(house.background) < OPEN_JOBS:
                house.background.run(house.calls.end_session(worker, session))

    def turn_ended(self, session: str, stop: Stop) -> None:
        """The prefill worker that served the session's turn is told; nobody waits for that."""
        worker, house = self._house.placement.get(session), self._house
        if worker is not None and worker in house.registry and len(house.background) < OPEN_JOBS:
            house.background.run(house.calls.turn_ended(worker, session, stop))

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._house.counts.open_jobs += 1
        try:
            yield
        finally:
            self._house.counts.open_jobs -= 1

    def status(self) -> dict[str, Any]:
        """What `forebay status` shows of this cluster."""
        registry, now = self._house.registry, self._house.clock()
        return {
            "cluster": self.cluster,
            "pid": os.getpid(),
            "epoch": self.holder.epoch,
            "ready": self.ready,
            "open_jobs": self._house.counts.open_jobs,
            "queued_jobs": len(self._house.admission),
            "streams": len(self._house.streams),
            "workers": [worker_status(entry, registry.state(name, now)) for name, entry in registry.all.items()],
        }

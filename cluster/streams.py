"""The step streams of one ingress: one for each decode worker that has a job of it, for just so long.

An open stream keeps Serve from draining a worker, and counts as load; so the first job opens it and the last one
closes it. Its items are sorted into one inbox a job.
"""

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from forebay.cluster.calls import Calls, StreamBroken
from forebay.cluster.dispatch import Lost
from forebay.cluster.messages import Misrouted, StepEvent, StreamItem
from forebay.workers.job import Holder


class Inbox(asyncio.Queue[StepEvent | Misrouted | Lost]):
    """What happens to one try of one job, in order."""


@dataclass(slots=True, eq=False)
class _Stream:
    name: str
    inboxes: dict[str, Inbox] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None


class Streams:
    def __init__(self, calls: Calls, holder: Holder) -> None:
        self._calls = calls
        self._holder = holder
        self._numbers = itertools.count()
        self._streams: dict[str, _Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    @contextmanager
    def listen(self, worker: str, job_id: str, inbox: Inbox) -> Iterator[str]:
        """Sends the job's events to `inbox`; gives the name of the stream to start the job on."""
        stream = self._streams.get(worker) or self._open(worker)
        stream.inboxes[job_id] = inbox
        try:
            yield stream.name
        finally:
            stream.inboxes.pop(job_id, None)
            if not stream.inboxes:
                self._close(worker, stream)

    def _open(self, worker: str) -> _Stream:
        # The holder's epoch makes the name one that no other ingress of this worker used.
        stream = _Stream(f"{self._holder.epoch}/{next(self._numbers)}")
        stream.task = asyncio.create_task(self._pump(worker, stream))
        self._streams[worker] = stream
        return stream

    def _close(self, worker: str, stream: _Stream) -> None:
        if self._streams.get(worker) is stream:
            del self._streams[worker]
        if stream.task is not None:
            stream.task.cancel()

    async def _pump(self, worker: str, stream: _Stream) -> None:
        try:
            async with self._calls.events(worker, self._holder, stream.name) as items:
                async for events in items:
                    _sort(events, stream.inboxes)
            lost = Lost(worker=worker, reason="unreachable", detail="the worker ended the stream")
        except StreamBroken as broken:
            lost = broken.lost
        stream.task = None
        self._close(worker, stream)
        for inbox in stream.inboxes.values():
            inbox.put_nowait(lost)


def _sort(events: StreamItem, inboxes: dict[str, Inbox]) -> None:
    for event in events:
        if isinstance(event, Misrouted):
            raise StreamBroken(Lost(worker=event.wanted, reason="misrouted"))
        if inbox := inboxes.get(event.job_id):
            inbox.put_nowait(event)

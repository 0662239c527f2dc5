"""What a decode worker's steps brought, sorted by the stream that carries it away: one item a step and stream.

A stream's name is chosen by its reader. The box is made by whichever comes first, the reader or a job, so no event is
lost between the two; it is gone when both are.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field

from forebay.cluster.messages import StepEvent
from forebay.workers.job import Failure, Holder
from forebay.workers.outcome import Emitted


@dataclass(slots=True, eq=False)
class _Box:
    holder: Holder
    jobs: set[str] = field(default_factory=set)
    events: list[StepEvent] = field(default_factory=list)
    readers: int = 0
    closed: bool = False
    stirred: asyncio.Event = field(default_factory=asyncio.Event)


def _ends(event: StepEvent) -> bool:
    return isinstance(event, Failure) or (isinstance(event, Emitted) and event.finish is not None)


class Outboxes:
    """All boxes of one worker. Used from one asyncio loop."""

    def __init__(self) -> None:
        self._boxes: dict[str, _Box] = {}
        self._jobs: dict[str, tuple[str, asyncio.Event]] = {}

    def __len__(self) -> int:
        return len(self._boxes)

    def enter(self, job_id: str, holder: Holder, stream: str) -> asyncio.Event:
        """From now on the job's events go to `stream`; the event is set when the job has ended."""
        assert job_id not in self._jobs, f"{job_id} was started twice"
        ended = asyncio.Event()
        box = self._box(stream, holder)
        box.jobs.add(job_id)
        self._jobs[job_id] = stream, ended
        if box.closed:
            ended.set()
        return ended

    def leave(self, job_id: str) -> None:
        stream, _ = self._jobs.pop(job_id)
        box = self._boxes[stream]
        box.jobs.discard(job_id)
        self._drop_if_unused(stream)

    def put(self, events: Iterable[StepEvent]) -> None:
        """Events of one step. Those of jobs that have left are dropped: nobody waits for them."""
        for event in events:
            if entry := self._jobs.get(event.job_id):
                stream, ended = entry
                self._boxes[stream].events.append(event)
                self._boxes[stream].stirred.set()
                if _ends(event):
                    ended.set()

    async def read(self, holder: Holder, stream: str) -> AsyncGenerator[list[StepEvent]]:
        """Yields what has gathered since the last item. When the reader goes, so do the jobs: nobody would listen."""
        box = self._box(stream, holder)
        box.readers += 1
        try:
            while not box.closed:
                await box.stirred.wait()
                box.stirred.clear()
                events, box.events = box.events, []
                if events:
                    yield events
        finally:
            box.readers -= 1
            self._close(stream)

    def release(self, holder: Holder) -> None:
        """The holder is gone: its jobs have ended, its readers stop."""
        for stream in [name for name, box in self._boxes.items() if box.holder == holder]:
            self._close(stream)

    def _close(self, stream: str) -> None:
        box = self._boxes[stream]
        box.closed = True
        box.stirred.set()
        for job_id in box.jobs:
            self._jobs[job_id][1].set()
        self._drop_if_unused(stream)

    def _box(self, stream: str, holder: Holder) -> _Box:
        return self._boxes.setdefault(stream, _Box(holder))

    def _drop_if_unused(self, stream: str) -> None:
        box = self._boxes[stream]
        unread = bool(box.events) and not box.closed
        if not (box.jobs or box.readers or unread):
            del self._boxes[stream]

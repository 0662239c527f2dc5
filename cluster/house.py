"""What all jobs of one ingress share."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from forebay.cluster.admission import Admission
from forebay.cluster.calls import Calls
from forebay.cluster.counts import Counts
from forebay.cluster.dispatch import Lost
from forebay.cluster.placement import Placement
from forebay.cluster.registry import Registry
from forebay.cluster.streams import Inbox, Streams
from forebay.workers.job import Holder


class Background:
    """Calls that nobody waits for, held until they end. Each belongs to one job, so they are as bounded as jobs are."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def run(self, call: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Watchers:
    """Inboxes of the jobs that depend on a worker: told when it is gone."""

    def __init__(self) -> None:
        self._inboxes: dict[str, set[Inbox]] = {}

    @contextmanager
    def watch(self, worker: str, inbox: Inbox) -> Iterator[None]:
        self._inboxes.setdefault(worker, set()).add(inbox)
        try:
            yield
        finally:
            self._inboxes[worker].discard(inbox)
            if not self._inboxes[worker]:
                del self._inboxes[worker]

    def tell(self, lost: Lost) -> None:
        for inbox in self._inboxes.get(lost.worker, ()):
            inbox.put_nowait(lost)


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    holder: Holder
    calls: Calls
    registry: Registry
    admission: Admission
    streams: Streams
    placement: Placement
    watchers: Watchers
    background: Background
    counts: Counts
    clock: Callable[[], float]

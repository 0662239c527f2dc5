"""Workers as they stand in a pool: asyncio for calls, streams and beats around one thread that computes.

A replica knows no Ray: who it is and how it reaches its ingress are given to it (`actors.py` does that). Every call
names the worker it is meant for, and a replica refuses a call for another one, since Serve may send it astray.
"""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from forebay.cluster.beat import ANSWER_S, PERIOD_S, Beat, Heart, Kind
from forebay.cluster.messages import Begun, Misrouted, StreamItem
from forebay.cluster.outbox import Outboxes
from forebay.cluster.step_loop import StepLoop, Worker
from forebay.router.wire import Stop
from forebay.workers.job import Failure, Holder, Job
from forebay.workers.outcome import Emitted, Prefilled

if TYPE_CHECKING:
    from forebay.workers.decode import DecodeWorker
    from forebay.workers.prefill import PrefillWorker

SendBeat = Callable[[Beat], Awaitable[Holder]]
STALL_S = 5.0
"""A busy worker that made no step for so long hangs."""


class Replica:
    """What both kinds share: identity, the step loop, the heart."""

    kind: Kind

    def __init__(self, name: str, node: str, worker: Worker, send_beat: SendBeat) -> None:
        self.name = name
        self._node = node
        self._loop = StepLoop(worker, self._deliver)
        self._loop.start()
        self._heart = Heart()
        self._answered_at = time.monotonic()
        self._freed_after_s: float | None = None
        self._beating = asyncio.create_task(self._beat_on(send_beat))

    def check_health(self) -> None:
        """Serve asks this every second, and replaces a replica that raises."""
        stalled_s = self._loop.pulse.stalled_s(time.monotonic())
        if stalled_s > STALL_S:
            raise RuntimeError(f"{self.kind} worker {self.name} made no step for {stalled_s:.1f} s")
        if self._loop.pulse.stats.canary_failed:
            raise RuntimeError(f"{self.kind} worker {self.name} resumed from other bytes than it had stored")

    async def close(self) -> None:
        self._beating.cancel()
        await asyncio.to_thread(self._loop.stop)

    def _refusal(self, job_id: str, holder: Holder, to: str) -> Misrouted | Failure | None:
        """A call for another worker, or of an ingress that is gone, takes nothing here."""
        if to != self.name:
            return Misrouted(wanted=to, got=self.name)
        if not self._heart.admits(holder):
            return Failure(job_id=job_id, kind="cancelled", message=f"{holder} is gone")
        self._release(self._heart.adopt(holder))
        return None

    async def _beat_on(self, send_beat: SendBeat) -> None:
        while True:
            started = time.monotonic()
            self._release(await self._beat_once(send_beat))
            await asyncio.sleep(max(0.0, PERIOD_S - (time.monotonic() - started)))

    async def _beat_once(self, send_beat: SendBeat) -> Holder | None:
        """One beat; returns the holder that it shows to be gone."""
        try:
            holder = await asyncio.wait_for(send_beat(self._say()), ANSWER_S)
        except Exception:  # whatever kept the answer away, it is a failed beat
            return self._heart.failed(time.monotonic())
        gone = self._heart.answered(holder)
        if gone is None:
            self._answered_at = time.monotonic()
        return gone

    def _say(self) -> Beat:
        pulse = self._loop.pulse
        stalled_s = pulse.stalled_s(time.monotonic())
        return Beat(
            worker=self.name,
            kind=self.kind,
            pid=os.getpid(),
            node=self._node,
            pulse=pulse,
            stalled_s=stalled_s,
            freed_after_s=self._freed_after_s,
        )

    def _release(self, holder: Holder | None) -> None:
        if holder is not None:
            self._loop.post(lambda: self._free(holder, self._answered_at))
            self._released(holder)

    def _free(self, holder: Holder, answered_at: float) -> None:
        """In the loop's thread."""
        self._loop.worker.release_holder(holder)
        self._freed_after_s = time.monotonic() - answered_at

    def _deliver(self, outcomes: list[Any]) -> None:
        raise NotImplementedError

    def _released(self, holder: Holder) -> None:
        raise NotImplementedError


class PrefillReplica(Replica):
    kind: Kind = "prefill"

    def __init__(self, name: str, node: str, worker: "PrefillWorker", send_beat: SendBeat) -> None:
        self._worker = worker
        self._waiting: dict[str, tuple[Holder, asyncio.Future[Prefilled | Failure]]] = {}
        super().__init__(name, node, worker, send_beat)

    async def prefill(self, job: Job, holder: Holder, to: str) -> Prefilled | Failure | Misrouted:
        """Returns when the job's handoff waits in the arena. Cancelled, the job gives back all that it took."""
        if refused := self._refusal(job.id, holder, to):
            return refused
        future: asyncio.Future[Prefilled | Failure] = asyncio.get_running_loop().create_future()
        self._waiting[job.id] = holder, future
        self._loop.post(lambda: self._submit(job, holder))
        try:
            return await future
        except asyncio.CancelledError:
            self._drop(job.id)
            raise
        finally:
            self._waiting.pop(job.id, None)

    async def end(self, job_id: str, to: str) -> None:
        """The job needs nothing more of this worker: neither computing nor its handoff."""
        if to == self.name:
            self._drop(job_id)

    async def end_session(self, session: str, to: str) -> None:
        if to == self.name:
            self._loop.post(lambda: self._worker.end_session(session))

    async def turn_ended(self, session: str, stop: Stop, to: str) -> None:
        if to == self.name:
            self._loop.post(lambda: self._worker.turn_ended(session, stop))

    def _drop(self, job_id: str) -> None:
        self._loop.post(lambda: self._worker.cancel(job_id))
        self._loop.post(lambda: self._worker.release_handoff(job_id))

    def _submit(self, job: Job, holder: Holder) -> None:
        """In the loop's thread."""
        if refusal := self._worker.submit(job, holder, time.monotonic()):
            self._loop.say([refusal])

    def _deliver(self, outcomes: list[Prefilled | Failure]) -> None:
        for outcome in outcomes:
            _, future = self._waiting.get(outcome.job_id, (None, None))
            if future is None:
                self._drop(outcome.job_id)
            elif not future.done():
                future.set_result(outcome)

    def _released(self, holder: Holder) -> None:
        for job_id, (owner, future) in list(self._waiting.items()):
            if owner == holder and not future.done():
                future.set_result(Failure(job_id=job_id, kind="cancelled", message="its ingress is gone"))


class DecodeReplica(Replica):
    kind: Kind = "decode"

    def __init__(self, name: str, node: str, worker: "DecodeWorker", send_beat: SendBeat) -> None:
        self._worker = worker
        self._outboxes = Outboxes()
        super().__init__(name, node, worker, send_beat)

    async def reserve(self, job_id: str, holder: Holder, n_tokens: int, to: str) -> Failure | Misrouted | None:
        """A slot and the pages of `n_tokens` tokens, until `end`, the holder's end, or the reservation's time-out."""
        if refused := self._refusal(job_id, holder, to):
            return refused
        try:
            return await self._loop.call(lambda: self._worker.reserve(job_id, holder, n_tokens, time.monotonic()))
        except asyncio.CancelledError:
            self._loop.post(lambda: self._worker.cancel(job_id))
            raise

    async def start(
        self, job: Job, prefilled: Prefilled | Failure | Misrouted, holder: Holder, stream: str, to: str
    ) -> Failure | Misrouted | None:
        """Runs the job and lasts as long as it does; its tokens go out on `stream`. Cancelled, it frees everything.

        `prefilled` comes from the prefill worker as a promise: Ray resolves it before this begins.
        """
        if refused := self._refusal(job.id, holder, to):
            return refused
        if not isinstance(prefilled, Prefilled):
            self._loop.post(lambda: self._worker.cancel(job.id))
            return prefilled
        ended = self._outboxes.enter(job.id, holder, stream)
        try:
            self._loop.post(lambda: self._start(job, prefilled, holder))
            await ended.wait()
            return None
        finally:
            self._outboxes.leave(job.id)
            self._loop.post(lambda: self._worker.cancel(job.id))

    async def events(self, holder: Holder, stream: str, to: str) -> AsyncGenerator[StreamItem]:
        """All events of the jobs that were started on `stream`, one item a step. Ends with its reader or its holder."""
        match self._refusal("", holder, to):
            case Misrouted() as misrouted:
                yield [misrouted]
                return
            case Failure():
                return
        async with aclosing(self._outboxes.read(holder, stream)) as items:
            async for events in items:
                yield events

    async def end(self, job_id: str, to: str) -> None:
        """The job needs nothing more of this worker, its reservation included."""
        if to == self.name:
            self._loop.post(lambda: self._worker.cancel(job_id))

    def _start(self, job: Job, prefilled: Prefilled, holder: Holder) -> None:
        """In the loop's thread."""
        failure = self._worker.start(job, prefilled, holder, time.monotonic())
        begun = Begun(
            job_id=job.id,
            cached_tokens=prefilled.cached_tokens,
            computed_tokens=prefilled.computed_tokens,
            miss=prefilled.miss,
            tier_tokens=prefilled.tier_tokens,
        )
        self._loop.say([failure or begun])

    def _deliver(self, outcomes: list[Begun | Emitted | Failure]) -> None:
        self._outboxes.put(outcomes)

    def _released(self, holder: Holder) -> None:
        self._outboxes.release(holder)

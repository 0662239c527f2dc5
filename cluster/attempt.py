"""One try of one job on one prefill and one decode worker.

    slot on a decode worker -> prefill(job) -> start(job, promise) -> events: Begun, Emitted ..., the last with `finish`

Everything it takes is entered as a context, so leaving it for any reason (finished, client gone, worker dead,
deadline) gives it back: the slot, the stream, the prefill in flight or its handoff, the sequence.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager

from forebay.cluster.calls import PrefillPromise, Promise
from forebay.cluster.dispatch import Ending, Lost, NoWorker, choose_prefill
from forebay.cluster.house import House
from forebay.cluster.messages import Begun, Misrouted
from forebay.cluster.streams import Inbox
from forebay.workers.job import Failure, Job
from forebay.workers.outcome import Emitted

POLL_S = 0.1


class Attempt:
    """`tell` gets the events that the client sees. `patience_s` bounds the wait for a live worker; 0: do not wait."""

    def __init__(self, house: House, job: Job, tell: Callable[[Begun | Emitted], None], patience_s: float) -> None:
        self._house = house
        self._job = job
        self._tell = tell
        self._patience_s = patience_s
        self._ended_there = False
        """The decode worker has ended the job itself, and holds nothing of it."""

    async def run(self) -> Ending:
        async with self._slot() as decode:
            if not isinstance(decode, str):
                return decode
            prefill = await self._prefill_worker()
            if prefill is None:
                return NoWorker(kind="prefill")
            ending = await self._run_on(prefill, decode)
            self._house.counts.ended(decode, "decode", ending)
            return ending

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[str | Failure | Lost | NoWorker]:
        """The decode worker that has promised a slot."""
        worker = await self._take_slot()
        try:
            yield worker
        finally:
            if isinstance(worker, str):
                self._free_slot(worker)

    async def _take_slot(self) -> str | Failure | Lost | NoWorker:
        house, job = self._house, self._job
        while True:
            worker = await house.admission.take(
                job.id, priority=job.priority, timeout_s=job.timeout_s, patience_s=self._patience_s
            )
            if not isinstance(worker, str):
                return worker
            try:
                answer = await house.calls.reserve(worker, job.id, house.holder, len(job.ids))
            except asyncio.CancelledError:
                self._free_slot(worker)
                raise
            match answer:
                case None:
                    return worker
                case Failure(kind="overloaded"):
                    house.admission.refused(worker, job.id)
                case _:
                    house.admission.give_back(worker, job.id)
                    return self._concluded(answer, worker)

    def _free_slot(self, worker: str) -> None:
        if not self._ended_there:
            self._house.background.run(self._house.calls.end("decode", worker, self._job.id))
        self._house.admission.give_back(worker, self._job.id)

    async def _prefill_worker(self) -> str | None:
        """The worker where the session's cache is, or the best of those that live."""
        house, session = self._house, self._job.session
        until = house.clock() + self._patience_s
        while True:
            now = house.clock()
            worker = choose_prefill(house.registry.live("prefill", now), session, house.placement.get(session))
            if worker is not None:
                house.placement.put(session, worker)
                return worker
            if now >= until and not house.registry.alive("prefill", now):
                return None
            await asyncio.sleep(POLL_S)

    async def _run_on(self, prefill: str, decode: str) -> Ending:
        house, inbox = self._house, Inbox()
        with ExitStack() as held:
            held.enter_context(house.watchers.watch(decode, inbox))
            stream = held.enter_context(house.streams.listen(decode, self._job.id, inbox))
            prefilling = held.enter_context(ExitStack())
            prefilling.enter_context(house.watchers.watch(prefill, inbox))
            promise = prefilling.enter_context(self._prefilling(prefill))
            held.enter_context(self._decoding(decode, promise, stream, inbox))
            return await self._follow(inbox, prefilling, prefill, decode)

    async def _follow(self, inbox: Inbox, prefilling: ExitStack, prefill: str, decode: str) -> Ending:
        begun = False
        while True:
            match event := await inbox.get():
                case Begun():
                    begun = True
                    prefilling.close()  # the handoff is adopted
                    self._tell(event)
                case Emitted(finish=finish):
                    self._ended_there = finish is not None
                    self._tell(event)
                    if finish is not None:
                        return finish
                case Failure():
                    self._ended_there = True
                    return event
                case Misrouted() | Lost():
                    return self._concluded(event, *([decode] if begun else [decode, prefill]))

    @contextmanager
    def _prefilling(self, worker: str) -> Iterator[PrefillPromise]:
        """A prefill in flight; afterwards the worker holds nothing of the job."""
        house, job = self._house, self._job
        promise = house.calls.prefill(worker, job, house.holder)
        house.registry.assign(worker, job.id)
        try:
            yield promise
        finally:
            house.registry.unassign(worker, job.id)
            promise.cancel()
            house.background.run(house.calls.end("prefill", worker, job.id))

    @contextmanager
    def _decoding(self, worker: str, prefilled: PrefillPromise, stream: str, inbox: Inbox) -> Iterator[None]:
        """The job in its decode worker, as a call that lasts as long as the job."""
        promise = self._house.calls.start(worker, self._job, prefilled, self._house.holder, stream)
        forward = asyncio.create_task(_forward(promise, inbox))
        try:
            yield
        finally:
            forward.cancel()
            if not self._ended_there:
                promise.cancel()

    def _concluded(self, ending: Failure | Misrouted | Lost, *suspects: str) -> Failure | Lost:
        """What the ending says about workers."""
        house, now = self._house, self._house.clock()
        match ending:
            case Misrouted(wanted=worker) | Lost(worker=worker, reason="misrouted"):
                house.registry.misrouted(worker, now)
                return Lost(worker=worker, reason="misrouted")
            case Lost(worker=worker, reason="died"):
                house.registry.remove(worker)
            case Lost(reason="unreachable"):
                for worker in suspects:
                    house.registry.suspect(worker)
        return ending


async def _forward(promise: Promise, inbox: Inbox) -> None:
    """The call's answer is an event where it is bad; when all went well, the job's last event comes by the stream."""
    answer = await promise.wait()
    if answer is not None:
        inbox.put_nowait(answer)

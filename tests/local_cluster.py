"""A cluster in one event loop: a real ingress and real replicas around plain workers, with Ray's part played by calls.

`kill` does what kill -9 does to a replica: its calls and streams break, its beats stop. Serve's part is played by
`start_worker`.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

from plain_workers import PlainDecode, PlainPrefill

from forebay.cluster.beat import Beat, Kind
from forebay.cluster.calls import StreamBroken
from forebay.cluster.dispatch import Lost
from forebay.cluster.ingress import Ingress
from forebay.cluster.messages import Misrouted, StreamItem
from forebay.cluster.replicas import DecodeReplica, PrefillReplica, Replica
from forebay.router.wire import Frame, JobRequest, Stop, Tokens, WireSampling
from forebay.workers.job import Failure, Holder, Job


class LocalPromise:
    """A call in flight as a task; `dead` resolves it as the worker's death does."""

    def __init__(self, calls: "LocalCalls", call: Any, worker: str) -> None:
        self.calls = calls
        self.task = asyncio.ensure_future(call)
        self.worker = worker
        self.lost: Lost | None = None

    async def wait(self) -> Any:
        await asyncio.wait([self.task])
        if self.lost is not None:
            return self.lost
        if self.task.cancelled():
            return Lost(worker=self.worker, reason="unreachable", detail="cancelled")
        return self.task.result()

    def cancel(self) -> None:
        if not self.calls.severed:
            self.task.cancel()


class LocalCluster:
    """`async with` it. Workers' classes are given, so that a test can slow or break them."""

    def __init__(
        self,
        prefill: Callable[[], PlainPrefill] = PlainPrefill,
        decode: Callable[[], PlainDecode] = PlainDecode,
    ) -> None:
        self._make = {"prefill": prefill, "decode": decode}
        self._names = itertools.count()
        self.replicas: dict[str, Replica] = {}
        self.in_flight: dict[str, set[LocalPromise]] = {}
        self.stream_tasks: dict[str, set[asyncio.Task[Any]]] = {}
        self.ingress: Ingress | None = None
        self.calls = LocalCalls(self)
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "LocalCluster":
        self.start_ingress()
        self.start_worker("prefill")
        self.start_worker("decode")
        await self.until(lambda: self.ingress is not None and self.ingress.ready)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.kill_ingress()
        for name in list(self.replicas):
            await self.kill(name)

    def start_ingress(self) -> Ingress:
        self.calls = LocalCalls(self)
        self.ingress = Ingress("c1", self.calls)
        self._watch = asyncio.create_task(self.ingress.watch())
        return self.ingress

    def kill_ingress(self) -> None:
        """It says no more word to any worker. (Its jobs are the test's own tasks: cancel those.)"""
        self.calls.severed = True
        self.ingress = None
        assert self._watch is not None
        self._watch.cancel()

    def start_worker(self, kind: Kind) -> str:
        name = f"{kind}-{next(self._names)}"
        replica = PrefillReplica if kind == "prefill" else DecodeReplica
        self.replicas[name] = replica(name, "node", self._make[kind](), self._send_beat)
        return name

    async def kill(self, name: str) -> None:
        replica = self.replicas.pop(name)
        replica._beating.cancel()
        for promise in self.in_flight.pop(name, set()):
            promise.lost = Lost(worker=name, reason="died")
            promise.task.cancel()
        for task in self.stream_tasks.pop(name, set()):
            task.cancel()
        if isinstance(replica._loop.worker, PlainDecode):
            replica._loop.worker.hang = False
        await replica.close()

    def worker(self, kind: Kind) -> Any:
        """The worker of the newest replica of a kind."""
        return [replica for replica in self.replicas.values() if replica.kind == kind][-1]._loop.worker

    def name(self, kind: Kind) -> str:
        return [name for name, replica in self.replicas.items() if replica.kind == kind][-1]

    async def run(self, request: JobRequest) -> list[Frame]:
        assert self.ingress is not None
        frames: list[Frame] = []
        await self.ingress.run(request, frames.append)
        return frames

    async def until(self, condition: Callable[[], bool], wait_s: float = 10.0) -> None:
        async with asyncio.timeout(wait_s):
            while not condition():
                await asyncio.sleep(0.01)

    async def _send_beat(self, beat: Beat) -> Holder:
        if self.ingress is None:
            raise ConnectionError("the ingress is gone")
        return self.ingress.beat(beat)


class LocalCalls:
    """What `calls.Calls` asks for. Once `severed`, its ingress is dead: nothing that it does reaches a worker."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.severed = False

    def _promise(self, worker: str, call: Callable[[Any], Any]) -> LocalPromise:
        assert not self.severed, "a dead ingress made a call"
        replica = self.cluster.replicas.get(worker)

        async def dead() -> None:
            raise asyncio.CancelledError

        promise = LocalPromise(self, dead() if replica is None else call(replica), worker)
        if replica is None:
            promise.lost = Lost(worker=worker, reason="died")
        else:
            held = self.cluster.in_flight.setdefault(worker, set())
            held.add(promise)
            promise.task.add_done_callback(lambda _: held.discard(promise))
        return promise

    async def reserve(self, worker: str, job_id: str, holder: Holder, n_tokens: int) -> Any:
        return await self._promise(worker, lambda r: r.reserve(job_id, holder, n_tokens, worker)).wait()

    def prefill(self, worker: str, job: Job, holder: Holder) -> LocalPromise:
        return self._promise(worker, lambda r: r.prefill(job, holder, worker))

    def start(self, worker: str, job: Job, prefilled: Any, holder: Holder, stream: str) -> LocalPromise:
        async def start(replica: Any) -> Failure | Misrouted | Lost | None:
            await asyncio.wait([prefilled.task])
            if prefilled.task.cancelled():
                return Lost(worker=worker, reason="unreachable", detail="the prefill was not done")
            return await replica.start(job, prefilled.task.result(), holder, stream, worker)

        return self._promise(worker, start)

    @asynccontextmanager
    async def events(self, worker: str, holder: Holder, stream: str) -> AsyncIterator[AsyncIterator[StreamItem]]:
        items: asyncio.Queue[StreamItem | None] = asyncio.Queue()
        reader = asyncio.create_task(self._read(worker, holder, stream, items))
        self.cluster.stream_tasks.setdefault(worker, set()).add(reader)
        try:
            yield self._items(worker, items)
        finally:
            if not self.severed:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)
            self.cluster.stream_tasks.get(worker, set()).discard(reader)

    async def _read(self, worker: str, holder: Holder, stream: str, items: "asyncio.Queue[StreamItem | None]") -> None:
        """Ray's part of a stream: it is ended by the reader's going, or by the worker's death."""
        try:
            if replica := self.cluster.replicas.get(worker):
                async with aclosing(replica.events(holder, stream, worker)) as events:  # type: ignore[attr-defined]
                    async for item in events:
                        items.put_nowait(item)
        finally:
            items.put_nowait(None)

    async def _items(self, worker: str, items: "asyncio.Queue[StreamItem | None]") -> AsyncIterator[StreamItem]:
        while (item := await items.get()) is not None:
            yield item
        if worker not in self.cluster.replicas:
            raise StreamBroken(Lost(worker=worker, reason="died"))

    async def end(self, kind: Kind, worker: str, job_id: str) -> None:
        if not self.severed and (replica := self.cluster.replicas.get(worker)):
            await replica.end(job_id, worker)

    async def end_session(self, worker: str, session: str) -> None:
        if not self.severed and (replica := self.cluster.replicas.get(worker)):
            assert isinstance(replica, PrefillReplica)
            await replica.end_session(session, worker)

    async def turn_ended(self, worker: str, session: str, stop: Stop) -> None:
        if not self.severed and (replica := self.cluster.replicas.get(worker)):
            assert isinstance(replica, PrefillReplica)
            await replica.turn_ended(session, stop, worker)


def request_of(name: str, *, max_tokens: int = 20, timeout_s: float = 30.0, **fields: Any) -> JobRequest:
    ids = [(len(name) + 7 * i) % 50 for i in range(9)]
    return JobRequest(
        id=name,
        ids=ids,
        n_prompt=len(ids),
        seed=3,
        sampling=WireSampling(max_tokens=max_tokens),
        timeout_s=timeout_s,
        **fields,
    )


def tokens_of(frames: list[Frame]) -> list[int]:
    return [token.id for frame in frames if isinstance(frame, Tokens) for token in frame.tokens]

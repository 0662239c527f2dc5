"""An ingress' calls to its workers, through Ray Serve's handles. What Ray raises becomes `Lost` here, nowhere else."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from typing import Any

from ray import serve
from ray.exceptions import ActorDiedError

from forebay.cluster.beat import Kind
from forebay.cluster.calls import PrefillPromise, StreamBroken
from forebay.cluster.dispatch import Lost
from forebay.cluster.messages import Misrouted, StreamItem
from forebay.router.wire import Stop
from forebay.workers.job import Failure, Holder, Job

ANSWER_S = 5.0
"""A worker answers a short call between two steps. A call that found no worker would wait for ever."""


def app_name(cluster: str, kind: Kind) -> str:
    return f"{cluster}-{kind}"


class ServePromise:
    def __init__(self, response: Any, worker: str) -> None:
        self.response = response
        self._worker = worker

    async def wait(self) -> Failure | Misrouted | Lost | None:
        answer: Failure | Misrouted | Lost | None = await _answer(self.response, self._worker)
        return answer

    def cancel(self) -> None:
        _cancel(self.response)


class ServeCalls:
    """Handles are made at the first call: the pools may come up after the ingress."""

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster
        self._methods: dict[tuple[Kind, str], Any] = {}

    async def reserve(
        self, worker: str, job_id: str, holder: Holder, n_tokens: int
    ) -> Failure | Misrouted | Lost | None:
        response = self._method("decode", "reserve").remote(job_id, holder, n_tokens, to=worker)
        answer: Failure | Misrouted | Lost | None = await _within(response, worker)
        return answer

    def prefill(self, worker: str, job: Job, holder: Holder) -> ServePromise:
        return ServePromise(self._method("prefill", "prefill").remote(job, holder, to=worker), worker)

    def start(self, worker: str, job: Job, prefilled: PrefillPromise, holder: Holder, stream: str) -> ServePromise:
        assert isinstance(prefilled, ServePromise)
        response = self._method("decode", "start").remote(job, prefilled.response, holder, stream, to=worker)
        return ServePromise(response, worker)

    @asynccontextmanager
    async def events(self, worker: str, holder: Holder, stream: str) -> AsyncIterator[AsyncIterator[StreamItem]]:
        # Only `cancel` ends a stream in the worker: dropping it, or cancelling its reader, leaves it running there.
        response = self._method("decode", "events", stream=True).remote(holder, stream, to=worker)
        try:
            yield _items(response, worker)
        finally:
            _cancel(response)

    async def end(self, kind: Kind, worker: str, job_id: str) -> None:
        await _within(self._method(kind, "end").remote(job_id, to=worker), worker)

    async def end_session(self, worker: str, session: str) -> None:
        await _within(self._method("prefill", "end_session").remote(session, to=worker), worker)

    async def turn_ended(self, worker: str, session: str, stop: Stop) -> None:
        await _within(self._method("prefill", "turn_ended").remote(session, stop, to=worker), worker)

    def _method(self, kind: Kind, name: str, *, stream: bool = False) -> Any:
        if (kind, name) not in self._methods:
            handle = serve.get_deployment_handle(kind, app_name=app_name(self._cluster, kind))
            self._methods[kind, name] = handle.options(method_name=name, stream=stream)
        return self._methods[kind, name]


async def _items(response: Any, worker: str) -> AsyncIterator[StreamItem]:
    try:
        async for events in response:
            yield events
    except Exception as error:
        raise StreamBroken(_lost(error, worker)) from None


async def _within(response: Any, worker: str) -> Any:
    """The answer, bounded in time."""
    try:
        async with asyncio.timeout(ANSWER_S):
            return await _answer(response, worker)
    except TimeoutError:
        _cancel(response)
        return Lost(worker=worker, reason="unreachable", detail=f"no answer in {ANSWER_S:g} s")


async def _answer(response: Awaitable[Any], worker: str) -> Any:
    try:
        return await response
    except Exception as error:
        return _lost(error, worker)


def _cancel(response: Any) -> None:
    with suppress(Exception):  # a call that failed on its way raises its failure here again
        response.cancel()


def _lost(error: Exception, worker: str) -> Lost:
    """Only the death of the very actor is known; whatever else went wrong may be another's."""
    first_line = next(iter(str(error).splitlines()), "")
    return Lost(
        worker=worker,
        reason="died" if isinstance(error, ActorDiedError) else "unreachable",
        detail=f"{type(error).__name__}: {first_line}",
    )

"""How an ingress reaches its workers, apart from how that is done (`serve_calls.py` does it with Ray Serve).

Every call is pinned to one worker. `Promise` is a call in flight: awaiting it gives the worker's answer, or `Lost`
where the worker did not live to give one; `cancel` ends it, and what it holds in the worker, at once.
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from forebay.cluster.beat import Kind
from forebay.cluster.dispatch import Lost
from forebay.cluster.messages import Misrouted, StreamItem
from forebay.router.wire import Stop
from forebay.workers.job import Failure, Holder, Job


class Promise(Protocol):
    async def wait(self) -> Failure | Misrouted | Lost | None: ...
    def cancel(self) -> None: ...


class PrefillPromise(Protocol):
    """Its result goes to a decode worker, never to the ingress."""

    def cancel(self) -> None: ...


class Calls(Protocol):
    async def reserve(
        self, worker: str, job_id: str, holder: Holder, n_tokens: int
    ) -> Failure | Misrouted | Lost | None: ...

    def prefill(self, worker: str, job: Job, holder: Holder) -> PrefillPromise: ...

    def start(self, worker: str, job: Job, prefilled: PrefillPromise, holder: Holder, stream: str) -> Promise:
        """In flight as long as the job runs."""
        ...

    def events(
        self, worker: str, holder: Holder, stream: str
    ) -> AbstractAsyncContextManager[AsyncIterator[StreamItem]]:
        """The only way to open a stream: leaving the `with` ends it in the worker, whatever happened. The iterator
        raises `StreamBroken` where the worker does not live on."""
        ...

    async def end(self, kind: Kind, worker: str, job_id: str) -> None:
        """The job needs nothing more of this worker. Never raises: a dead worker holds nothing."""
        ...

    async def end_session(self, worker: str, session: str) -> None:
        """No turn of the session comes to this prefill worker any more. Never raises."""
        ...

    async def turn_ended(self, worker: str, session: str, stop: Stop) -> None:
        """How the session's turn ended that this prefill worker served. Never raises."""
        ...


class StreamBroken(Exception):
    """The worker at the other end of a stream is gone, as far as can be known."""

    def __init__(self, lost: Lost) -> None:
        super().__init__(f"worker {lost.worker}: {lost.reason} {lost.detail}")
        self.lost = lost

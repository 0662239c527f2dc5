"""The router's side of POST /jobs: one job of one cluster, its frames as they come.

`open_job` is the one way to run a job. Leaving it, for whatever reason, closes the connection, which is what cancels
the job in the cluster. The outside world's failures are two: the cluster answered that it will not (`JobRefused`), or
it was lost (`ClusterLost`). All else is a frame.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from typing import Any, cast

import aiohttp
import msgspec

from forebay.router.liveness import Probe
from forebay.router.wire import (
    Failed,
    FailedKind,
    Finished,
    Frame,
    JobRequest,
    Started,
    Stop,
    Tokens,
    decode_frame,
    encode,
)

LINE_BYTES = 2**20  # a frame with many alternatives a token stays far below
HINTS_MAX = 256
GRACE_S = 5.0  # the cluster ends a job at its time-out itself; the connection outlives that a little

_decode_failed = msgspec.json.Decoder(Failed).decode


class JobRefused(Exception):
    """The cluster answered with a failure: nothing, or nothing more, will come of this job."""

    def __init__(self, cluster: str, failed: Failed) -> None:
        super().__init__(f"{cluster}: {failed.kind}: {failed.message}")
        self.cluster = cluster
        self.failed = failed


class ClusterLost(Exception):
    """The connection was refused (`refused`: at no time was there one), or ended before the job did."""

    def __init__(self, cluster: str, reason: str, *, refused: bool = False) -> None:
        super().__init__(f"{cluster}: {reason}")
        self.cluster = cluster
        self.reason = reason
        self.refused = refused


class IngressClient:
    """Connections to the ingress of every cluster. To be entered once, inside the event loop that uses it."""

    def __init__(self, urls: Mapping[str, str], *, connect_s: float, probe_s: float) -> None:
        self._urls = {name: url.rstrip("/") for name, url in urls.items()}
        self._connect_s = connect_s
        self._probe_s = probe_s
        self._scopes: defaultdict[str, set[asyncio.Timeout]] = defaultdict(set)
        self._hints: set[asyncio.Task[None]] = set()
        self._session: Any = None

    async def __aenter__(self) -> "IngressClient":
        self._session = aiohttp.ClientSession(
            # A new connection for each job: one from a pool may have died unseen, which would look like a lost cluster.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s),
            read_bufsize=LINE_BYTES,
            auto_decompress=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in list(self._hints):
            task.cancel()
        await asyncio.gather(*self._hints, return_exceptions=True)
        await self._session.close()

    @asynccontextmanager
    async def open_job(self, cluster: str, job: JobRequest) -> AsyncIterator[AsyncIterator[Frame]]:
        """Run a job. Yields its frames; a `Finished` is the last. Raises JobRefused or ClusterLost."""
        try:
            async with asyncio.timeout(job.timeout_s + GRACE_S) as scope:
                with self._watched(cluster, scope):
                    async with self._session.post(f"{self._urls[cluster]}/jobs", data=encode(job)) as response:
                        if response.status != 200:
                            raise JobRefused(cluster, await _refusal(response))
                        async with aclosing(_frames(cluster, response)) as frames:
                            yield frames
        except aiohttp.ClientConnectorError as error:
            raise ClusterLost(cluster, "the connection was refused", refused=True) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise ClusterLost(cluster, "the connection broke") from error
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise ClusterLost(cluster, "it answers no more") from error

    def cut(self, cluster: str) -> None:
        """The cluster hangs: end everything that is open to it as lost."""
        for scope in list(self._scopes[cluster]):
            if not scope.expired():
                scope.reschedule(asyncio.get_running_loop().time())

    async def probe(self, cluster: str) -> Probe:
        """Ask /ready, for a bounded time."""
        try:
            async with asyncio.timeout(self._probe_s):
                async with self._session.get(f"{self._urls[cluster]}/ready") as response:
                    return "ready" if response.status == 200 else "not_ready"
        except (aiohttp.ClientError, OSError):  # TimeoutError is one
            return "unreachable"

    async def status(self, cluster: str) -> object:
        """The ingress' own /status, or None where it gives none in time."""
        try:
            async with asyncio.timeout(self._probe_s):
                async with self._session.get(f"{self._urls[cluster]}/status") as response:
                    return msgspec.json.decode(await response.read()) if response.status == 200 else None
        except (aiohttp.ClientError, OSError, msgspec.DecodeError):
            return None

    def turn_ended(self, cluster: str, session: str, stop: Stop) -> None:
        """Tell the cluster how the session's turn ended. It is a hint: nobody waits, and nothing is tried again."""
        if len(self._hints) < HINTS_MAX:
            task = asyncio.create_task(self._hint(cluster, session, stop))
            self._hints.add(task)
            task.add_done_callback(self._hints.discard)

    async def end_session(self, cluster: str, session: str) -> None:
        """No turn of it comes any more. A cluster that cannot be reached keeps what it has until it needs the room."""
        with suppress(aiohttp.ClientError, OSError):  # TimeoutError is one
            async with asyncio.timeout(self._probe_s):
                async with self._session.delete(f"{self._urls[cluster]}/sessions/{session}"):
                    pass

    async def _hint(self, cluster: str, session: str, stop: Stop) -> None:
        with suppress(aiohttp.ClientError, OSError):  # TimeoutError is one
            async with asyncio.timeout(self._probe_s):
                url = f"{self._urls[cluster]}/sessions/{session}/turn"
                async with self._session.put(url, data=encode(stop)):
                    pass

    @contextmanager
    def _watched(self, cluster: str, scope: asyncio.Timeout) -> Iterator[None]:
        self._scopes[cluster].add(scope)
        try:
            yield
        finally:
            self._scopes[cluster].discard(scope)


async def _frames(cluster: str, response: Any) -> AsyncGenerator[Frame, None]:
    """Frames until the last. However the bytes were split on their way, a line is a frame."""
    try:
        async for line in response.content:
            frame = decode_frame(cast(bytes, line))
            match frame:
                case Started() | Tokens():
                    yield frame
                case Finished():
                    yield frame
                    return
                case Failed():
                    raise JobRefused(cluster, frame)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ClusterLost(cluster, "it sent what is not a frame") from error
    raise ClusterLost(cluster, "the stream ended before the job did")


async def _refusal(response: Any) -> Failed:
    """The body of a refusal; one that is none of ours is told by its status."""
    body = (await response.content.read(LINE_BYTES))[:LINE_BYTES]
    try:
        return _decode_failed(body)
    except msgspec.MsgspecError:
        kind: FailedKind = "no_workers" if response.status in (502, 503, 504) else "internal"
        return Failed(kind=kind, message=f"the cluster answered {response.status}")

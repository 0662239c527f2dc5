"""An ingress without a cluster: a real HTTP server on loopback that honours the wire, with faults on demand."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Literal

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from forebay.router.wire import (
    Failed,
    Finished,
    Frame,
    JobRequest,
    Started,
    Tokens,
    WireToken,
    decode_job,
    decode_stop,
    encode,
)

Fault = Literal[
    "", "no_workers", "overloaded", "invalid", "internal", "breaks_before", "breaks_after_2", "hangs", "garbage"
]
Reply = Callable[[JobRequest], list[int]]


@contextlib.contextmanager
def running(app: Any, port: int = 0) -> Iterator[tuple[str, uvicorn.Server]]:
    """Serve an ASGI app in a thread. Yields its URL; ends it at once on the way out."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    config = uvicorn.Config(app, log_config=None, lifespan="on", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}", server
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


def until(holds: Callable[[], object], wait_s: float = 10.0) -> None:
    """Wait until something holds."""
    end = time.monotonic() + wait_s
    while not holds():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)


class FakeIngress:
    """Answers a job with `reply(job)`, one frame a token. `seen` are the jobs it took, `open` those it holds now."""

    def __init__(self, reply: Reply, block_tokens: int = 8) -> None:
        self.reply = reply
        self.fault: Fault = ""
        self.ready = True
        self.silent = False
        self.token_s = 0.0
        self.prefill_s = 0.0
        self.open = 0
        self.seen: list[JobRequest] = []
        self.cancelled: list[str] = []
        self.ended: list[tuple[str, str]] = []
        self.over: list[str] = []
        self._block_tokens = block_tokens
        self._blocks: set[tuple[int, ...]] = set()
        self.app = Starlette(
            routes=[
                Route("/jobs", self._jobs, methods=["POST"]),
                Route("/sessions/{session}", self._end_session, methods=["DELETE"]),
                Route("/sessions/{session}/turn", self._turn_ended, methods=["PUT"]),
                Route("/ready", self._ready),
                Route("/status", self._status),
            ]
        )

    def forget(self) -> None:
        """As if nothing had been asked before."""
        self.seen.clear()
        self._blocks.clear()

    async def _ready(self, _: Request) -> Response:
        while self.silent:
            await asyncio.sleep(0.02)
        return Response(status_code=200 if self.ready else 503)

    async def _end_session(self, request: Request) -> Response:
        self.over.append(request.path_params["session"])
        return Response(status_code=204)

    async def _turn_ended(self, request: Request) -> Response:
        self.ended.append((request.path_params["session"], decode_stop(await request.body())))
        return Response(status_code=204)

    async def _status(self, _: Request) -> Response:
        return JSONResponse({"jobs": len(self.seen)})

    async def _jobs(self, request: Request) -> Any:
        job = decode_job(await request.body())
        self.seen.append(job)
        kinds = {"no_workers": 503, "overloaded": 429, "invalid": 400, "internal": 500}
        if self.fault in kinds:
            return Response(
                encode(Failed(kind=self.fault, message="stop_ids: no", retry_after_s=2.5)), kinds[self.fault]
            )
        return _Answer(self, job)

    async def frames(self, job: JobRequest) -> AsyncIterator[Frame]:
        if self.fault == "hangs":
            await asyncio.sleep(3600)
        await asyncio.sleep(self.prefill_s)
        cached = self._look_up(job.ids)
        yield Started(cached_tokens=cached, computed_tokens=len(job.ids) - cached)
        tokens = self.reply(job)[: job.sampling.max_tokens]
        for place, token in enumerate(tokens):
            if (self.fault == "breaks_before" and place == 0) or (self.fault == "breaks_after_2" and place == 2):
                raise ConnectionAbortedError
            await asyncio.sleep(self.token_s)
            yield Tokens(tokens=[_token(token, job)])
            if token in job.sampling.stop_ids:
                yield Finished(reason="stop")
                return
        yield Finished(reason="length")

    def _look_up(self, ids: list[int]) -> int:
        """Whole blocks seen before, never the last token; then all of the prompt's are known."""
        ends = range(self._block_tokens, len(ids) + 1, self._block_tokens)
        hits = [end for end in ends if tuple(ids[:end]) in self._blocks and end < len(ids)]
        self._blocks.update(tuple(ids[:end]) for end in ends)
        return max(hits, default=0)


class _Answer:
    """Streams a job's frames; notices when its client goes."""

    def __init__(self, ingress: FakeIngress, job: JobRequest) -> None:
        self._ingress = ingress
        self._job = job

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self._ingress.open += 1
        stream = asyncio.create_task(self._stream(send))
        gone = asyncio.create_task(self._gone(receive))
        try:
            await asyncio.wait({stream, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not stream.done():
                self._ingress.cancelled.append(self._job.id)
        finally:
            stream.cancel()
            gone.cancel()
            await asyncio.wait({stream, gone})
            self._ingress.open -= 1
        if not stream.cancelled() and stream.exception():
            raise ConnectionAbortedError  # the server closes the connection in the middle of the answer

    async def _stream(self, send: Any) -> None:
        started = False
        async for frame in self._ingress.frames(self._job):
            if not started:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                started = True
            line = b'{"type":"what"}\n' if self._ingress.fault == "garbage" else encode(frame) + b"\n"
            for part in (line[:7], line[7:]):
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _gone(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


def _token(token: int, job: JobRequest) -> WireToken:
    if job.sampling.logprobs is None:
        return WireToken(id=token)
    top = [(token, -0.5), *((other, -1.0 - other) for other in range(job.sampling.logprobs))]
    return WireToken(id=token, logprob=-0.5, top=top[: job.sampling.logprobs])


def metric(text: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels."""
    total = 0.0
    for line in text.splitlines():
        head, _, value = line.rpartition(" ")
        if head.partition("{")[0] == name and all(f'{key}="{label}"' in head for key, label in labels.items()):
            total += float(value)
    return total

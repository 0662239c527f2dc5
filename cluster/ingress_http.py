"""The HTTP side of an ingress: POST /jobs answers with one JSON line a frame (router/wire.py).

The job lives in a task of its own beside a watch on the connection: a client that goes ends the task at once, not at
the next frame.
"""

import asyncio
import json
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from forebay.cluster.convert import fault
from forebay.cluster.dispatch import http_status
from forebay.cluster.exposition import samples
from forebay.cluster.ingress import Ingress
from forebay.ops.exposition import CONTENT_TYPE, render
from forebay.router.wire import Failed, Finished, Frame, JobRequest, decode_job, decode_stop, encode

BODY_BYTES = 64 << 20
"""A million ids in JSON take about 8 MB."""


class JobAnswer:
    """An ASGI application for one accepted request: waits for the first frame, whose kind decides the status."""

    def __init__(self, ingress: Ingress, request: JobRequest) -> None:
        self._ingress = ingress
        self._request = request
        self._frames: asyncio.Queue[Frame] = asyncio.Queue()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        job = asyncio.create_task(self._ingress.run(self._request, self._frames.put_nowait))
        gone = asyncio.create_task(_disconnected(receive))
        answer = asyncio.create_task(self._answer(scope, receive, send))
        try:
            done, _ = await asyncio.wait({job, gone, answer}, return_when=asyncio.FIRST_COMPLETED)
            if job in done and gone not in done and job.exception() is None:
                await asyncio.wait({gone, answer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (job, gone, answer):
                task.cancel()
            results = await asyncio.gather(job, gone, answer, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, OSError):
                raise result

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        frame = await self._frames.get()
        if isinstance(frame, Failed):
            return await _refusal(frame)(scope, receive, send)
        headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while True:
            lines: list[Frame] = [frame]
            while not self._frames.empty():
                lines.append(self._frames.get_nowait())
            last = isinstance(lines[-1], Finished | Failed)
            body = b"".join(encode(line) + b"\n" for line in lines)
            await send({"type": "http.response.body", "body": body, "more_body": not last})
            if last:
                return None
            frame = await self._frames.get()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def make_app(ingress: Ingress) -> Starlette:
    async def jobs(request: Request) -> Any:
        if refusal := ingress.refusal():
            return _refusal(refusal)
        try:
            job = decode_job(await _body(request))
        except msgspec.MsgspecError as error:
            return _refusal(Failed(kind="invalid", message=str(error)))
        except ValueError as error:
            return _refusal(Failed(kind="invalid", message=str(error)))
        if message := fault(job):
            return _refusal(Failed(kind="invalid", message=message))
        return JobAnswer(ingress, job)

    async def turn_ended(request: Request) -> Response:
        try:
            stop = decode_stop(await _body(request))
        except ValueError as error:  # msgspec's are
            return _refusal(Failed(kind="invalid", message=str(error)))
        ingress.turn_ended(request.path_params["session"], stop)
        return Response(status_code=204)

    async def end_session(request: Request) -> Response:
        ingress.end_session(request.path_params["session"])
        return Response(status_code=204)

    async def ready(_: Request) -> Response:
        return Response(status_code=200 if ingress.ready else 503)

    async def health(_: Request) -> Response:
        return Response(status_code=200)

    async def status(_: Request) -> Response:
        return Response(json.dumps(ingress.status()), media_type="application/json")

    async def metrics(_: Request) -> Response:
        return Response(render(samples(ingress)), headers={"content-type": CONTENT_TYPE})

    return Starlette(
        routes=[
            Route("/jobs", jobs, methods=["POST"]),
            Route("/sessions/{session}", end_session, methods=["DELETE"]),
            Route("/sessions/{session}/turn", turn_ended, methods=["PUT"]),
            Route("/ready", ready),
            Route("/health", health),
            Route("/status", status),
            Route("/metrics", metrics),
        ]
    )


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_BYTES:
            raise ValueError(f"the body exceeds {BODY_BYTES} bytes")
    return bytes(body)


def _refusal(failed: Failed) -> Response:
    headers = {} if failed.retry_after_s is None else {"retry-after": str(max(1, round(failed.retry_after_s)))}
    return Response(encode(failed), http_status(failed.kind), headers, "application/json")

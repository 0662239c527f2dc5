"""ASGI at its barest: a bounded body in, JSON or an event stream out, and a watch on the client's connection."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from forebay.router.outcome import ApiError, ErrorBody

encode = msgspec.json.encode


class ClientGone(Exception):
    """The client closed its connection before its answer was complete."""


async def read_body(scope: Scope, receive: Receive, bytes_max: int, wait_s: float) -> bytes:
    """The whole body. Its length and the time to send it are bounded."""
    length = dict(scope["headers"]).get(b"content-length", b"0")
    if length.isdigit() and int(length) > bytes_max:
        raise _too_large(bytes_max)
    body = bytearray()
    try:
        async with asyncio.timeout(wait_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                body += message.get("body", b"")
                if len(body) > bytes_max:
                    raise _too_large(bytes_max)
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        text = f"The body was not sent within {wait_s:g} s."
        raise ApiError(408, text, outcome="invalid", code="body_timeout") from None


def _too_large(bytes_max: int) -> ApiError:
    text = f"The body is larger than {bytes_max} bytes."
    return ApiError(413, text, outcome="too_large", code="body_too_large")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; when the client goes first, cancel it, wait until it has given everything back, and say so."""
    running = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({running, gone}, return_when=asyncio.FIRST_COMPLETED)
        was_gone = not running.done()
    finally:
        running.cancel()
        gone.cancel()
        await asyncio.wait({running, gone})
    if was_gone:
        raise ClientGone
    return running.result()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_json(send: Send, status: int, value: object, headers: Mapping[str, str]) -> None:
    body = encode(value)
    fields = {"content-type": "application/json", "content-length": str(len(body))} | dict(headers)
    await send({"type": "http.response.start", "status": status, "headers": _raw(fields)})
    await send({"type": "http.response.body", "body": body})


class EventStream:
    """Server-sent events. The head goes out with the first event or comment; a comment fills every long silence.

    Each event is one write, so a comment never falls into the middle of one.
    """

    def __init__(self, send: Send, headers: Mapping[str, str]) -> None:
        self._send = send
        self._headers = dict(headers)
        self._lock = asyncio.Lock()
        self._writes = 0
        self.started = False
        self.has_events = False

    def head(self, name: str, value: str) -> None:
        """Set a header of the answer; without effect once the head is out."""
        self._headers[name] = value

    async def events(self, values: list[dict[str, Any]]) -> None:
        if values:
            self.has_events = True
            await self._write(b"".join(b"data: " + encode(value) + b"\n\n" for value in values))

    async def fail(self, error: ErrorBody) -> None:
        """One framed error object, then the end."""
        await self._write(b"data: " + encode(error) + b"\n\n")
        await self.close()

    async def close(self) -> None:
        await self._write(b"data: [DONE]\n\n", more=False)

    @asynccontextmanager
    async def kept_alive(self, silence_s: float) -> AsyncIterator[None]:
        """Write a comment whenever nothing was written for `silence_s`, while the context is open."""
        task = asyncio.create_task(self._comment(silence_s))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def _comment(self, silence_s: float) -> None:
        while True:
            writes = self._writes
            await asyncio.sleep(silence_s)
            if writes == self._writes:
                await self._write(b": keep-alive\n\n")

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        async with self._lock:
            self._writes += 1
            if not self.started:
                self.started = True
                fields = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}
                await self._send(
                    {"type": "http.response.start", "status": 200, "headers": _raw(fields | self._headers)}
                )
            await self._send({"type": "http.response.body", "body": data, "more_body": more})


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]

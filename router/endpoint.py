"""POST /v1/chat/completions and /v1/completions: from the bytes of a request to the bytes of its answer or its error.

Errors before the first byte are HTTP statuses, afterwards one framed error object. However a request ends, it is
counted and logged once, and by then it holds nothing.
"""

import asyncio
import re
import secrets
import time
import traceback
from collections.abc import Mapping
from typing import Literal

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from forebay.router.ask import Ask, read_chat, read_completion
from forebay.router.classes import key_name
from forebay.router.door import Door
from forebay.router.http_edge import ClientGone, EventStream, read_body, send_json, while_connected
from forebay.router.log import Log
from forebay.router.outcome import ApiError, Outcome
from forebay.router.turn import Fleet, Turn

THREAD_BYTES = 32_768  # larger bodies are parsed and tokenised beside the event loop
_ID = re.compile(r"[\x21-\x7e]{1,128}")


def request_id(headers: Mapping[str, str]) -> str:
    """The client's own id if it is a plain one, else a new one."""
    given = headers.get("x-request-id", "")
    return given if _ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"


class Endpoint:
    """An ASGI application. Each request is a `_Request`."""

    def __init__(self, kind: Literal["chat", "completion"], fleet: Fleet, door: Door, write_log: Log) -> None:
        self._read = read_chat if kind == "chat" else read_completion
        self._kind = kind
        self._fleet = fleet
        self._door = door
        self._write_log = write_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = _Call(send, Headers(scope=scope))
        try:
            async with self._door.enter(self._fleet.config.request_s):
                await self._answer(call, scope, receive)
            call.outcome = "ok"
        except ClientGone:
            call.outcome = "cancelled"
        except ApiError as error:
            await call.fail(error)
        except Exception as error:
            await call.fail(ApiError(500, "The server failed to answer.", outcome="failed", code="internal"))
            # What the error itself says could hold a client's text: the server's log gets its kind and place alone.
            raise RuntimeError(f"{type(error).__name__} at {', '.join(_lines(error))}") from None
        finally:
            self._tell(call)

    async def _answer(self, call: "_Call", scope: Scope, receive: Receive) -> None:
        config = self._fleet.config
        key = key_name(call.headers.get("authorization"), config.keys)
        raw = await read_body(scope, receive, config.body_bytes_max, config.body_s)
        ask = await self._ask(raw, call.headers)
        del raw
        if ask.stream:
            call.stream = EventStream(call.send, {"x-request-id": call.id})
        call.turn = Turn(self._fleet, ask, key, call.began, call.stream)
        await while_connected(receive, self._serve(call, call.turn))

    async def _ask(self, raw: bytes, headers: Headers) -> Ask:
        if len(raw) <= THREAD_BYTES:
            return self._read(raw, headers, self._fleet.config, self._fleet.text)
        return await asyncio.to_thread(self._read, raw, headers, self._fleet.config, self._fleet.text)

    async def _serve(self, call: "_Call", turn: Turn) -> None:
        if call.stream is None:
            whole = await turn.run()
            await send_json(call.send, 200, whole, call.head())
            return
        await turn.run()
        await call.stream.close()

    def _tell(self, call: "_Call") -> None:
        took_s = time.monotonic() - call.began
        turn = call.turn
        class_name, cluster = (turn.class_name, turn.cluster) if turn else ("", "")
        self._fleet.stats.ended(class_name, cluster, call.outcome)
        if turn:
            turn.count()
            if class_name and cluster:
                self._fleet.stats.observe("request_duration_seconds", class_name, cluster, took_s)
        fields: dict[str, object] = {
            "event": "request",
            "request": call.id,
            "api": self._kind,
            "outcome": call.outcome,
            "status": call.status,
            "param": call.param,
            "took_s": round(took_s, 6),
        }
        self._write_log(fields | (turn.log_fields() if turn else {}))


class _Call:
    """One request on its way. `outcome` is what it is counted as, `status` what its head said or would have said."""

    def __init__(self, send: Send, headers: Headers) -> None:
        self.send = send
        self.headers = headers
        self.id = request_id(headers)
        self.began = time.monotonic()
        self.stream: EventStream | None = None
        self.turn: Turn | None = None
        self.outcome: Outcome = "cancelled"
        self.status = 200
        self.param: str | None = None

    def head(self) -> dict[str, str]:
        """What every answer carries."""
        cluster = self.turn.cluster if self.turn else ""
        return {"x-request-id": self.id} | ({"x-forebay-cluster": cluster} if cluster else {})

    async def fail(self, error: ApiError) -> None:
        self.outcome, self.param = error.outcome, error.param
        if self.stream is not None and self.stream.started:
            await self.stream.fail(error.body())
            return
        self.status = error.status
        await send_error(self.send, error, self.head())


async def send_error(send: Send, error: ApiError, headers: Mapping[str, str]) -> None:
    fields = dict(headers)
    if error.retry_after_s is not None:
        fields["retry-after"] = str(error.retry_after_s)
    if error.outcome in ("draining", "too_large") or error.status == 408:
        fields["connection"] = "close"
    await send_json(send, error.status, error.body(), fields)


def _lines(error: BaseException) -> list[str]:
    """Where an error came from, without what it said: that could hold a client's text."""
    return [f"{frame.name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)[-5:]]

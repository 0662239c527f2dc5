"""One streamed OpenAI request as a client sees it: when text came, what usage said, how it ended."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import msgspec

Api = Literal["chat", "completions"]
PATHS: dict[Api, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
LINE_BYTES_MAX = 1 << 22


@dataclass(slots=True, kw_only=True)
class Reply:
    """Times are seconds of the given clock. `error` is None for an answer that came whole; else its kind.

    `text_at_s` has the time of every chunk that brought text or a finish reason. Usage is None where none was sent.
    """

    sent_s: float
    end_s: float = 0.0
    text_at_s: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    cluster: str | None = None
    error: str | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[object] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    text: str | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details | None = None


class _Frame(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None


_decode = msgspec.json.Decoder(_Frame).decode


def body(api: Api, model: str, prompt: str, max_tokens: int, seed: int) -> dict[str, Any]:
    """The request's body; a chat has the prompt as its one user message."""
    text = {"messages": [{"role": "user", "content": prompt}]} if api == "chat" else {"prompt": prompt}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": model, **text, "max_tokens": max_tokens, "seed": seed, **stream}


async def ask(
    http: aiohttp.ClientSession,
    url: str,
    json_body: dict[str, Any],
    headers: dict[str, str],
    clock: Callable[[], float],
) -> Reply:
    """Sends and reads to the end. What goes wrong outside is a kind of error in the reply, never raised."""
    reply = Reply(sent_s=clock())
    try:
        async with http.post(url, json=json_body, headers=headers) as response:
            reply.cluster = response.headers.get("x-forebay-cluster")
            if response.status == 200:
                reply.error = await _read(response.content, reply, clock)
            else:
                reply.error = f"http_{response.status}"
    except TimeoutError:
        reply.error = "timeout"
    except aiohttp.ClientPayloadError:
        reply.error = "truncated"
    except (aiohttp.ClientError, OSError):
        reply.error = "connection"
    except (msgspec.DecodeError, ValueError):  # ValueError: a line longer than the reader's buffer
        reply.error = "bad_frame"
    reply.end_s = clock()
    return reply


async def _read(content: aiohttp.StreamReader, reply: Reply, clock: Callable[[], float]) -> str | None:
    """Reads frames until [DONE]; says what went wrong."""
    async for line in content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return None
        frame = _decode(data)
        if frame.error is not None:
            return "error_frame"
        if any(map(_has_text, frame.choices)):
            reply.text_at_s.append(clock())
        if frame.usage is not None:
            reply.prompt_tokens = frame.usage.prompt_tokens
            reply.output_tokens = frame.usage.completion_tokens
            details = frame.usage.prompt_tokens_details
            reply.cached_tokens = (details.cached_tokens if details else None) or 0
    return "truncated"


def _has_text(choice: _Choice) -> bool:
    delta = choice.delta
    brought = (choice.finish_reason, choice.text, delta.content, delta.reasoning_content, delta.tool_calls)
    return any(brought)

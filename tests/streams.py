"""Many open streams of one endpoint, read in threads: what each brought, and how it ended."""

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Stream:
    """One completion. `error` is what came instead of its end, `errors` how many were framed; `cluster` the header."""

    body: dict[str, Any]
    session: str
    status: int = 0
    cluster: str = ""
    text: str = ""
    tokens: int = 0
    finish: str | None = None
    error: Any = None
    errors: int = 0
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def open(self) -> bool:
        return self.tokens > 0 and self.finish is None and self.error is None


class Streams:
    """Starts all bodies at once; `wait` returns when all have ended."""

    def __init__(self, url: str, asks: Sequence[tuple[dict[str, Any], str]]) -> None:
        self.streams = [
            Stream(body | {"stream": True, "stream_options": {"include_usage": True}}, s) for body, s in asks
        ]
        self._threads = [threading.Thread(target=_read, args=(url, stream), daemon=True) for stream in self.streams]
        for thread in self._threads:
            thread.start()

    def open_count(self) -> int:
        return sum(stream.open for stream in self.streams)

    def wait_open(self, count: int, wait_s: float = 60.0) -> None:
        until = time.monotonic() + wait_s
        while self.open_count() < count:
            assert time.monotonic() < until, f"{self.open_count()} of {count} streams are open"
            time.sleep(0.02)

    def wait(self, wait_s: float = 120.0) -> list[Stream]:
        until = time.monotonic() + wait_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
            assert not thread.is_alive(), "a stream did not end"
        return self.streams


def _read(url: str, stream: Stream) -> None:
    headers = {"x-session-id": stream.session}
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=stream.body, headers=headers, timeout=120) as answer:
            stream.status, stream.cluster = answer.status_code, answer.headers.get("x-forebay-cluster", "")
            if answer.status_code != 200:
                stream.error = answer.read().decode()
                return
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    _take(stream, json.loads(line.removeprefix("data: ")))
    except httpx.HTTPError as error:
        stream.error = repr(error)


def _take(stream: Stream, event: dict[str, Any]) -> None:
    if "error" in event:
        stream.error = event["error"]
        stream.errors += 1
        return
    stream.usage = event.get("usage") or stream.usage
    for choice in event["choices"]:
        stream.text += choice["text"]
        stream.tokens += 1
        stream.finish = choice["finish_reason"] or stream.finish

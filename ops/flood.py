"""Does one class's flood cost another its answer times? A client that measures it at a running endpoint.

First an interactive client asks alone; then it asks the same while a batch class floods with prompts that were never
seen and never honours a Retry-After. Last, a batch request is refused, waits exactly as long as it was told, and asks
again. Every prompt is new, so nothing is answered from a cache.
"""

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from forebay.ops.bench_report import Reference, Row
from forebay.ops.openai_stream import Reply, ask, body
from forebay.ops.replay_report import percentile


class FloodError(Exception):
    """The endpoint did not answer as the measurement needs: nothing can be said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flood:
    """What is asked of the endpoint. The bearer token names the class."""

    url: str
    model: str
    interactive: int = 100
    interactive_chars: int = 600
    batch_clients: int = 8
    batch_chars: int = 3000
    output_tokens: int = 8
    pause_s: float = 0.1
    wait_s_max: float = 60.0


async def measure(flood: Flood) -> list[Row]:
    """Rows: the interactive class's time to first token alone and beside the flood, and what became of the flood."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http:
        await _interactive(http, flood, flood.interactive // 5)  # connections, allocations and caches of code warm up
        alone = await _interactive(http, flood, flood.interactive)
        stop = asyncio.Event()
        floods = [asyncio.create_task(_flood(http, flood, stop)) for _ in range(flood.batch_clients)]
        await asyncio.sleep(2.0)
        beside = await _interactive(http, flood, flood.interactive)
        told_s, after = await _obey(http, flood)
        stop.set()
        counts = [count for each in await asyncio.gather(*floods) for count in each]
    return [*_times(alone, beside), *_outcomes(counts, told_s, after)]


def _times(alone: Sequence[float], beside: Sequence[float]) -> list[Row]:
    rows = []
    for share in (50, 99):
        before, after = percentile(alone, share), percentile(beside, share)
        rows.append(Row(name=f"interactive TTFT p{share}, alone", value=before, unit="s"))
        reference = Reference(name="alone", value=before)
        rows.append(Row(name=f"interactive TTFT p{share}, batch floods", value=after, unit="s", reference=reference))
    return rows


def _outcomes(errors: Sequence[str | None], told_s: int, after: int) -> list[Row]:
    return [
        Row(name="batch requests answered in the flood", value=errors.count(None), unit="requests"),
        Row(name="batch requests refused with 429 in the flood", value=errors.count("http_429"), unit="requests"),
        Row(name="Retry-After of a refused request", value=told_s, unit="s"),
        Row(name="status of the same request after that wait", value=after, unit="HTTP status"),
    ]


def _request(flood: Flood, chars: int) -> dict[str, Any]:
    prompt = " ".join(uuid.uuid4().hex for _ in range(chars // 33 + 1))[:chars]
    return body("completions", flood.model, prompt, flood.output_tokens, seed=1)


def _headers(class_name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {class_name}", "x-session-id": uuid.uuid4().hex}


async def _ask(http: aiohttp.ClientSession, flood: Flood, class_name: str, chars: int) -> Reply:
    url = f"{flood.url}/v1/completions"
    return await ask(http, url, _request(flood, chars), _headers(class_name), time.perf_counter)


async def _interactive(http: aiohttp.ClientSession, flood: Flood, count: int) -> list[float]:
    times = []
    for _ in range(count):
        reply = await _ask(http, flood, "interactive", flood.interactive_chars)
        if reply.error is not None:
            raise FloodError(f"an interactive request failed: {reply.error}")
        times.append(reply.text_at_s[0] - reply.sent_s)
    return times


async def _flood(http: aiohttp.ClientSession, flood: Flood, stop: asyncio.Event) -> list[str | None]:
    outcomes = []
    while not stop.is_set():
        outcomes.append((await _ask(http, flood, "batch", flood.batch_chars)).error)
        await asyncio.sleep(flood.pause_s)
    return outcomes


async def _obey(http: aiohttp.ClientSession, flood: Flood) -> tuple[int, int]:
    """A refused request's Retry-After, and the status of the same request when it comes back after just that wait."""
    deadline_s = time.perf_counter() + flood.wait_s_max
    request, headers = _request(flood, flood.batch_chars), _headers("batch")
    while time.perf_counter() < deadline_s:
        status, told_s = await _status(http, flood, request, headers)
        if status == 429:
            if told_s < 1:
                raise FloodError("a refusal carries no Retry-After of at least a second")
            await asyncio.sleep(told_s)
            return told_s, (await _status(http, flood, request, headers))[0]
        request = _request(flood, flood.batch_chars)
    raise FloodError(f"the flood was never refused within {flood.wait_s_max:.0f} s")


async def _status(
    http: aiohttp.ClientSession, flood: Flood, request: dict[str, Any], headers: dict[str, str]
) -> tuple[int, int]:
    async with http.post(f"{flood.url}/v1/completions", json=request, headers=headers) as response:
        await response.read()
        return response.status, int(response.headers.get("retry-after", "0"))

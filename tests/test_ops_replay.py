"""The replayer against a real HTTP server that remembers what it was sent and caches prefixes without limit."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from forebay.ops import replay_cli
from forebay.ops.openai_stream import Reply
from forebay.ops.prompt_text import Sizes
from forebay.ops.replay import Answer, EndpointError, Options, Replayed, cut, replay
from forebay.ops.replay_report import percentile, rows, schedule_kept
from forebay.ops.trace import BLOCK_TOKENS, Request, infinite_cache

BLOCK = 32  # the endpoint's block, and what a block of the trace becomes
SIZES = Sizes(block_tokens=BLOCK, output_cap=3)


@dataclass
class Endpoint:
    """An OpenAI-like server of bytes. `fault` may answer in its stead; `pace_s` passes before every chunk."""

    pace_s: float = 0.0
    fault: Callable[[web.Request, int], Awaitable[web.StreamResponse | None]] | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    flying: int = 0
    flying_max: int = 0
    url: str = ""

    async def __aenter__(self) -> "Endpoint":
        app = web.Application(client_max_size=1 << 24)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_post("/v1/completions", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = len(self.bodies)
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if self.fault and (response := await self.fault(request, number)) is not None:
            return response
        self.flying += 1
        self.flying_max = max(self.flying_max, self.flying)
        start = time.monotonic()
        try:
            return await self._stream(request, body)
        finally:
            self.flying -= 1
            self.spans.append((start, time.monotonic()))

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        prompt = prompt_of(body)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": body["max_tokens"], "total_tokens": 0}
        usage["prompt_tokens_details"] = {"cached_tokens": self._cached(prompt)}  # type: ignore[assignment]
        response = web.StreamResponse(headers={"x-forebay-cluster": "ab"[len(request.headers["x-session-id"]) % 2]})
        await response.prepare(request)
        await send(response, {"choices": [{"delta": {"role": "assistant"}}]})
        for _ in range(body["max_tokens"]):
            await asyncio.sleep(self.pace_s)
            chat = {"delta": {"content": "x"}} if "messages" in body else {"text": "x"}
            await send(response, {"choices": [chat]})
        await send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    def _cached(self, prompt: str) -> int:
        """Whole blocks whose prefix was sent before."""
        prefixes = [prompt[: end + BLOCK] for end in range(0, len(prompt) - BLOCK + 1, BLOCK)]
        hit = next((i for i, prefix in enumerate(prefixes) if prefix not in self.seen), len(prefixes))
        self.seen.update(prefixes)
        return hit * BLOCK


async def send(response: web.StreamResponse, frame: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(frame).encode() + b"\n\n")


def prompt_of(body: dict[str, Any]) -> str:
    prompt: str = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
    return prompt


def request(at_ms: float, *hash_ids: int, session: str | None = None, output: int = 100) -> Request:
    tokens = len(hash_ids) * BLOCK_TOKENS
    return Request(timestamp_ms=at_ms, input_tokens=tokens, output_tokens=output, hash_ids=hash_ids, session=session)


def run(endpoint: Endpoint, requests: list[Request], **options: Any) -> Replayed:
    async def go() -> Replayed:
        async with endpoint:
            chosen = Options(**{"url": endpoint.url, "sizes": SIZES, **options})
            return await replay(requests, chosen, lambda _: None)

    return asyncio.run(go())


def figures(replayed: Replayed) -> dict[str, float]:
    return {row.name: row.value for row in rows(replayed)}


def test_the_cached_share_of_an_endless_cache_is_the_theoretical_one() -> None:
    trace = [request(i, *ids) for i, ids in enumerate([(0, 1), (0, 1, 2), (0, 3), (0, 1, 2, 4), (5, 6), (0, 3, 7)])]
    replayed = run(Endpoint(), trace, max_concurrency=1, api="completions")
    told = figures(replayed)
    assert told["completed"] == told["sent"] == 6
    assert told["cached share"] == pytest.approx(infinite_cache(trace).by_token)
    assert told["infinite cache, by block"] == pytest.approx(8 / 16)
    assert told["input"] == 16 * BLOCK
    assert told["output"] == 6 * 3


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_bodies_are_streamed_openai_requests(api: str) -> None:
    endpoint = Endpoint()
    run(endpoint, [request(0, 0, 1), request(1, 0, 1, 2)], api=api, api_key="k")
    first, second = endpoint.bodies
    assert first["model"] == "tiny"
    assert first["max_tokens"] == 3
    assert first["stream_options"] == {"include_usage": True}
    assert prompt_of(second).startswith(prompt_of(first))
    sent = {key.lower(): value for key, value in endpoint.headers[0].items()}
    assert sent["authorization"] == "Bearer k"
    assert sent["x-session-id"] == "replay-0"


def test_a_turn_waits_for_the_turn_before_and_for_its_time() -> None:
    trace = [request(0, 0, 1), request(1, 0, 1, 2), request(2, 9, 8), request(400, 0, 1, 2, 3)]
    replayed = run(Endpoint(pace_s=0.03), trace, speed=2.0)
    first, second, other, last = replayed.answers
    assert second.reply.sent_s >= first.reply.end_s
    assert other.reply.sent_s < first.reply.end_s
    assert last.reply.sent_s >= max(0.2, second.reply.end_s)
    assert [answer.due_s for answer in replayed.answers] == pytest.approx([0, 0.0005, 0.001, 0.2])
    assert second.ready_s == first.reply.end_s


def test_concurrency_is_bounded_and_its_wait_is_send_lag() -> None:
    endpoint = Endpoint(pace_s=0.02)
    replayed = run(endpoint, [request(0, i) for i in range(8)], max_concurrency=2)
    assert endpoint.flying_max == 2
    told = figures(replayed)
    assert told["send lag p99"] > 0.1
    assert told["E2E from due p99"] > told["E2E p99"]


@pytest.mark.parametrize(("lag_s", "kept"), [(0.9, True), (1.1, False)])
def test_a_client_that_falls_behind_says_so(lag_s: float, kept: bool) -> None:
    (turn,), _ = cut([request(0, 0)], Options(url=""))
    answer = Answer(turn=turn, due_s=0.0, ready_s=2.0, reply=Reply(sent_s=2.0 + lag_s, end_s=9.0))
    replayed = Replayed(answers=(answer,), skipped=0, duration_s=9.0, options=Options(url=""))
    assert schedule_kept(replayed) == kept


def test_latencies_are_of_text_alone_not_of_the_role() -> None:
    told = figures(run(Endpoint(pace_s=0.05), [request(0, 0)]))
    assert told["TTFT p50"] >= 0.05
    assert told["ITL p50"] >= 0.045
    assert told["E2E p50"] >= 0.15


def test_what_does_not_fit_is_skipped_and_the_limit_counts_what_is_sent() -> None:
    trace = [request(i, *range(100 * i, 100 * i + blocks)) for i, blocks in enumerate([4, 1, 9, 2, 1])]
    plan, skipped = cut(trace, Options(url="", api="completions", sizes=SIZES, context_tokens=70, limit=2))
    assert [turn.request.timestamp_ms for turn in plan] == [1, 3]
    assert skipped == 2
    plan, skipped = cut(trace, Options(url="", api="chat", sizes=SIZES, context_tokens=100))
    assert [turn.request.timestamp_ms for turn in plan] == [1, 4], "a chat needs room for its frame"


def test_clusters_and_affinity_are_counted() -> None:
    trace = [request(0, 0, 1, session="x"), request(1, 0, 1, 2, session="x"), request(2, 7, 8, session="yy")]
    told = figures(run(Endpoint(), trace))
    assert (told["answered by a"], told["answered by b"]) in ((1, 2), (2, 1))
    assert told["affinity"] == 1.0
    assert told["sessions"] == 2


def _faults() -> dict[str, Callable[[web.Request, int], Awaitable[web.StreamResponse | None]]]:
    async def refuse(_: web.Request, number: int) -> web.StreamResponse | None:
        return web.json_response({"error": {}}, status=429) if number == 0 else None

    async def frame(request: web.Request, number: int) -> web.StreamResponse | None:
        return await _broken(request, b'data: {"error": {"message": "x"}}\n\n') if number == 0 else None

    async def garbage(request: web.Request, number: int) -> web.StreamResponse | None:
        return await _broken(request, b"data: {oops\n\n") if number == 0 else None

    async def cut_short(request: web.Request, number: int) -> web.StreamResponse | None:
        return await _broken(request, b'data: {"choices": []}\n\n') if number == 0 else None

    async def drop(request: web.Request, number: int) -> web.StreamResponse | None:
        if number == 0:
            assert request.transport is not None
            request.transport.close()
        return None

    async def hang(request: web.Request, number: int) -> web.StreamResponse | None:
        while number == 0 and request.transport is not None:
            await asyncio.sleep(0.05)
        return None

    return {
        "http_429": refuse,
        "error_frame": frame,
        "bad_frame": garbage,
        "truncated": cut_short,
        "connection": drop,
        "timeout": hang,
    }


async def _broken(request: web.Request, body: bytes) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(body)
    return response


@pytest.mark.parametrize("kind", _faults())
def test_a_failure_is_counted_by_kind_and_the_session_goes_on(kind: str) -> None:
    endpoint = Endpoint(fault=_faults()[kind])
    replayed = run(endpoint, [request(0, 0, 1), request(1, 0, 1, 2)], timeout_s=1.0)
    told = figures(replayed)
    assert told[f"failed: {kind}"] == told["failed"] == told["completed"] == 1
    assert told["input"] == 3 * BLOCK


def test_no_endpoint_is_one_clear_error() -> None:
    with pytest.raises(EndpointError, match="/v1/models"):
        asyncio.run(replay([request(0, 0)], Options(url="http://127.0.0.1:9"), lambda _: None))


def test_percentiles_are_linear() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0, 2.0], 99) == pytest.approx(1.99)
    assert percentile([5.0], 99) == 5.0
    assert percentile([], 50) == 0.0


def _write_trace(path: Path) -> None:
    row = {"timestamp": 0, "input_length": 1024, "output_length": 9, "hash_ids": [0, 1]}
    later = {**row, "timestamp": 50, "input_length": 1100, "hash_ids": [0, 1, 2]}
    path.write_text(f"{json.dumps(row)}\n{json.dumps(later)}\n")


def test_the_command_prints_and_writes_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write_trace(tmp_path / "t.jsonl")

    async def go() -> int:
        async with Endpoint() as endpoint:
            flags = [str(tmp_path / "t.jsonl"), "--url", endpoint.url + "/v1", "--json", str(tmp_path / "r.json")]
            return await asyncio.to_thread(replay_cli.main, [*flags, "--block-tokens", "32", "--context", "4096"])

    assert asyncio.run(go()) == 0
    printed = capsys.readouterr().out
    told = {row["name"]: row for row in json.loads((tmp_path / "r.json").read_text())["rows"]}
    assert told["completed"]["value"] == 2
    assert told["cached share"]["reference"]["name"] == "infinite cache"
    for words in ("sha256", "--block-tokens 32", "TTFT p99", "cached share", "from sending the request"):
        assert words in printed


def test_the_command_says_what_is_wrong_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.jsonl").write_text('{"timestamp": 0}\n')
    assert replay_cli.main([str(tmp_path / "bad.jsonl"), "--url", "http://127.0.0.1:9"]) == 1
    assert "line 1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        replay_cli.main([str(tmp_path / "bad.jsonl"), "--url", "x", "--speed", "0"])

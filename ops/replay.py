"""Replays a trace against an OpenAI-compatible endpoint, open loop, with the order inside sessions kept.

A request is due at its recorded time divided by `speed`, and goes when it is due and its session's last turn is over.
At most `max_concurrency` are in flight: the rest wait in the client, and the report shows that wait as send lag.
Prompts are the recorded ones; live answers are measured and thrown away.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp

from forebay.ops.openai_stream import LINE_BYTES_MAX, PATHS, Api, Reply, ask, body
from forebay.ops.prompt_text import Sizes, prompt_text
from forebay.ops.trace import Request
from forebay.ops.turns import Turn, turns

CHAT_FRAME_TOKENS = 64  # room for the chat format around one user message
PROGRESS_EVERY_S = 1.0


class EndpointError(Exception):
    """The endpoint cannot be replayed against at all; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to send and how. `model` None asks the endpoint. Prompts over `context_tokens` are skipped and counted."""

    url: str
    model: str | None = None
    api: Api = "chat"
    speed: float = 1.0
    limit: int | None = None
    max_concurrency: int = 64
    sizes: Sizes = field(default_factory=Sizes)
    context_tokens: int | None = None
    timeout_s: float = 600.0
    api_key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One turn and its reply. Seconds since the replay's start; `ready_s`: due, and the turn before it over."""

    turn: Turn
    due_s: float
    ready_s: float
    reply: Reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """All answers in trace order, what was left out, and how long it took."""

    answers: tuple[Answer, ...]
    skipped: int
    duration_s: float
    options: Options


def cut(requests: Sequence[Request], options: Options) -> tuple[list[Turn], int]:
    """The turns to send: the first `limit` of those that fit the context, and how many before them did not."""
    kept: list[Request] = []
    skipped = 0
    for request in sorted(requests, key=lambda request: request.timestamp_ms):
        if options.limit is not None and len(kept) >= options.limit:
            break
        if _fits(request, options):
            kept.append(request)
        else:
            skipped += 1
    return turns(kept), skipped


def _fits(request: Request, options: Options) -> bool:
    if options.context_tokens is None:
        return True
    frame = CHAT_FRAME_TOKENS if options.api == "chat" else 0
    tokens = options.sizes.prompt_tokens(request) + options.sizes.output_tokens(request)
    return tokens + frame <= options.context_tokens


async def replay(requests: Sequence[Request], options: Options, show: Callable[[str], None]) -> Replayed:
    """Sends every turn and returns when all are over. `show` is given a line of progress every second."""
    plan, skipped = cut(requests, options)
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=options.timeout_s),
        read_bufsize=LINE_BYTES_MAX,
        headers=headers,
    ) as http:
        model = options.model or await served_model(http, options.url)
        run = _Run(http, model, options, plan)
        watch = asyncio.create_task(run.watch(show))
        try:
            answers = await run.all()
        finally:
            watch.cancel()
    return Replayed(answers=tuple(answers), skipped=skipped, duration_s=run.now(), options=options)


async def served_model(http: aiohttp.ClientSession, url: str) -> str:
    """The first model that the endpoint names."""
    try:
        async with http.get(f"{url}/v1/models") as response:
            response.raise_for_status()
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
        raise EndpointError(f"{url}/v1/models names no model: {error}") from error


class _Run:
    """The tasks of one replay: one a turn, and the clock they share."""

    def __init__(self, http: aiohttp.ClientSession, model: str, options: Options, plan: list[Turn]) -> None:
        self._http, self._model, self._options, self._plan = http, model, options, plan
        self._clock = asyncio.get_running_loop().time
        self._start_s = self._clock()
        self._origin_ms = plan[0].request.timestamp_ms if plan else 0.0
        self._over = [asyncio.Event() for _ in plan]
        self._end_s = [0.0 for _ in plan]
        self._gate = asyncio.Semaphore(options.max_concurrency)
        self._sent = self._ended = self._failed = 0

    def now(self) -> float:
        return self._clock() - self._start_s

    async def all(self) -> list[Answer]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._one(turn)) for turn in self._plan]
        return [task.result() for task in tasks]

    async def _one(self, turn: Turn) -> Answer:
        due_s = (turn.request.timestamp_ms - self._origin_ms) / 1000 / self._options.speed
        await asyncio.sleep(due_s - self.now())
        ready_s = due_s
        if turn.parent is not None:
            await self._over[turn.parent].wait()
            ready_s = max(due_s, self._end_s[turn.parent])
        async with self._gate:
            reply = await self._send(turn)
        self._end_s[turn.index] = reply.end_s
        self._over[turn.index].set()
        return Answer(turn=turn, due_s=due_s, ready_s=ready_s, reply=reply)

    async def _send(self, turn: Turn) -> Reply:
        sizes, api = self._options.sizes, self._options.api
        prompt = prompt_text(turn.request, sizes)
        json_body = body(api, self._model, prompt, sizes.output_tokens(turn.request), turn.index)
        self._sent += 1
        headers = {"x-session-id": turn.session}
        reply = await ask(self._http, self._options.url + PATHS[api], json_body, headers, self.now)
        self._ended += 1
        self._failed += reply.error is not None
        return reply

    async def watch(self, show: Callable[[str], None]) -> None:
        while True:
            await asyncio.sleep(PROGRESS_EVERY_S)
            flying = self._sent - self._ended
            show(
                f"{self.now():6.0f} s  {self._ended}/{len(self._plan)} over, {flying} in flight, {self._failed} failed"
            )

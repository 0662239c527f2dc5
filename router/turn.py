"""One request's way: the order of its clusters, its budget, its jobs, and what is shown of them.

The rule of failover. Until anything of the answer has been shown, a lost or unready cluster means the next one of the
session's list, from the beginning and with the same seed; afterwards it means one framed error.
"""

import secrets
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from math import ceil
from typing import Any

from forebay.router.ask import Ask, TextSide
from forebay.router.classes import classify
from forebay.router.config import ModelConfig, RouterConfig
from forebay.router.fan_out import FanOut, fan_out
from forebay.router.gate import Admitted, Gate, OverBudget
from forebay.router.http_edge import EventStream
from forebay.router.ingress_client import ClusterLost, IngressClient, JobRefused
from forebay.router.liveness import Liveness
from forebay.router.memory import SessionMemory, uncached_tokens
from forebay.router.openai_chat import ChatShape
from forebay.router.openai_completion import CompletionShape
from forebay.router.openai_shape import Shape
from forebay.router.outcome import ApiError
from forebay.router.progress import Progress
from forebay.router.ring import alive_order
from forebay.router.route import moved, order
from forebay.router.stats import Stats
from forebay.router.wire import Finished, Frame, JobRequest, Started, Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What all turns of a router share. `gates` has the budget of each cluster."""

    config: RouterConfig
    text: TextSide
    client: IngressClient
    liveness: Liveness
    gates: Mapping[str, Gate]
    memory: SessionMemory
    stats: Stats


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a turn will need in a cluster, as far as the router knows."""

    class_name: str
    uncached_tokens: int
    resident_bytes: int


class Turn:
    """`cluster` and `class_name` are those of the latest try; empty before the first."""

    def __init__(self, fleet: Fleet, ask: Ask, key: str, began: float, stream: EventStream | None) -> None:
        self.cluster = ""
        self.class_name = ""
        self.tries = 0
        self.first_token_s: float | None = None
        self._fleet = fleet
        self._ask = ask
        self._key = key
        self._began = began
        self._stream = stream
        self._progress: Progress | None = None
        self._shown_at: dict[int, float] = {}

    async def run(self) -> dict[str, Any] | None:
        """The whole answer, or None when it was streamed. ApiError says how else the request ends."""
        for cluster in self._order()[: self._fleet.config.tries]:
            self.cluster, self.tries = cluster, self.tries + 1
            try:
                progress = await self._attempt(cluster)
            except (ClusterLost, JobRefused) as error:
                self._leave(cluster, error)
            else:
                self._fleet.client.turn_ended(cluster, self._ask.session.key, progress.stop)
                return None if self._stream else progress.whole()
        raise ApiError(503, "No healthy cluster can serve this request.", outcome="no_cluster", retry_after_s=1)

    def log_fields(self) -> dict[str, object]:
        """What the log tells of the turn, with the session as a digest."""
        usage = self._progress.usage() if self._progress else None
        return {
            "session": self._ask.session.key,
            "session_source": self._ask.session.source,
            "class": self.class_name,
            "cluster": self.cluster,
            "tries": self.tries,
            "stream": self._ask.stream,
            "choices": self._ask.choices,
            "prompt_tokens": self._ask.prompt_tokens,
            "cached_tokens": usage.cached_tokens if usage else None,
            "output_tokens": usage.output_tokens if usage else 0,
            "ttft_s": self.first_token_s,
            "ignored_fields": len(self._ask.ignored),
        }

    def count(self) -> None:
        """Tell the tokens of a turn that a cluster began to answer."""
        if self._progress and self.first_token_s is not None:
            usage = self._progress.usage()
            self._fleet.stats.answered(
                self.class_name, self.cluster, usage.prompt_tokens, usage.cached_tokens, usage.output_tokens
            )

    def _order(self) -> tuple[str, ...]:
        fleet, session = self._fleet, self._ask.session.key
        alive = fleet.liveness.alive()
        weights, placement = fleet.config.weights, fleet.memory.placement(session)
        primary = next(iter(alive_order(session, weights, alive)), None)
        cached = primary is not None and self._cached_tokens(primary) > 0
        return order(session, weights, alive, placement, cached, time.monotonic(), fleet.config.idle_s)

    async def _attempt(self, cluster: str) -> Progress:
        estimate = self._estimate(cluster)
        self.class_name = estimate.class_name
        if self._stream:
            self._stream.head("x-forebay-cluster", cluster)
        self._progress = progress = Progress(self._ask, self._fleet.text, self._shape())
        try:
            async with self._fleet.gates[cluster].admit(
                estimate.class_name, self._ask.session.key, estimate.uncached_tokens, estimate.resident_bytes
            ) as admitted:
                await self._serve(cluster, progress, admitted, self._jobs(estimate.class_name))
        except OverBudget as error:
            text = f"Class '{estimate.class_name}' is over its budget; retry after {error.retry_after_s} s."
            raise ApiError(
                429, text, outcome=error.outcome, code="rate_limit_exceeded", retry_after_s=error.retry_after_s
            ) from error
        return progress

    async def _serve(
        self, cluster: str, progress: Progress, admitted: Admitted, groups: list[list[JobRequest]]
    ) -> None:
        try:
            async with self._kept_alive(), fan_out(self._fleet.client, cluster, groups) as (jobs, frames):
                async for index, frame in frames:
                    await self._take(cluster, progress, admitted, jobs, index, frame)
        except (ClusterLost, JobRefused):
            admitted.settle(progress.computed_tokens)  # nothing more will be computed for it
            raise
        admitted.settle(progress.computed_tokens)
        if self._stream:
            await self._stream.events(progress.last_chunks())

    def _kept_alive(self) -> AbstractAsyncContextManager[None]:
        """Comments from admission on: they send the head, after which a refusal could not be a status any more."""
        return self._stream.kept_alive(self._fleet.config.keepalive_s) if self._stream else nullcontext()

    async def _take(
        self, cluster: str, progress: Progress, admitted: Admitted, jobs: FanOut, index: int, frame: Frame
    ) -> None:
        chunks: list[dict[str, Any]] = []
        match frame:
            case Started():
                progress.started(index, frame)
                self._remember(cluster)
                if progress.all_started:
                    admitted.settle(progress.computed_tokens)
            case Tokens():
                self._observe(cluster, index)
                chunks = progress.tokens(index, frame)
                if progress.complete(index):
                    jobs.stop(index)
            case Finished():
                chunks = progress.finished(index, frame)
        if self._stream:
            await self._stream.events(chunks)

    def _leave(self, cluster: str, error: ClusterLost | JobRefused) -> None:
        """Go on to the next cluster, or say how the request ends."""
        if isinstance(error, JobRefused) and error.failed.kind != "no_workers":
            raise _refusal(error) from error
        if isinstance(error, JobRefused):
            self._fleet.liveness.refuse(cluster)
            reason = "not_ready"
        else:
            reason = "refused" if error.refused else "broken"
            if error.refused:
                self._fleet.liveness.lose(cluster)
        if self._stream and self._stream.has_events:
            text = "The cluster that served this request was lost before its answer was complete."
            raise ApiError(503, text, outcome="broken", code="cluster_lost") from error
        self._fleet.stats.failed_over(cluster, reason)

    def _estimate(self, cluster: str) -> Estimate:
        ask, model = self._ask, self._fleet.config.model
        cached = self._cached_tokens(cluster) if len(ask.prompts) == 1 else 0
        uncached = sum(uncached_tokens(len(prompt), cached, model.block_tokens) for prompt in ask.prompts)
        # Further choices of a prompt find its blocks and compute only what is beyond the last of them.
        tails = sum(uncached_tokens(len(prompt), len(prompt), model.block_tokens) for prompt in ask.prompts)
        return Estimate(
            class_name=classify(self._fleet.config.rules, self._key, ask.prompt_tokens, uncached),
            uncached_tokens=uncached + (ask.n - 1) * tails,
            resident_bytes=_resident_bytes(ask, model),
        )

    def _cached_tokens(self, cluster: str) -> int:
        generation = self._fleet.liveness.generation(cluster)
        return self._fleet.memory.cached_tokens(self._ask.session.key, cluster, generation)

    def _remember(self, cluster: str) -> None:
        self._fleet.memory.remember(
            self._ask.session.key,
            cluster,
            self._fleet.liveness.generation(cluster),
            len(self._ask.prompts[0]),
            time.monotonic(),
        )

    def _jobs(self, class_name: str) -> list[list[JobRequest]]:
        """One group of jobs a prompt. Their ids are new with every try, whatever the client calls its request."""
        ask, config = self._ask, self._fleet.config
        attempt = secrets.token_hex(8)
        placement = self._fleet.memory.placement(ask.session.key)
        priority = next(each.priority for each in config.classes if each.name == class_name)
        return [
            [
                JobRequest(
                    id=f"{attempt}-{place * ask.n + choice}",
                    ids=prompt,
                    n_prompt=len(prompt),
                    seed=ask.seed,
                    choice=choice,
                    sampling=ask.samplings[place],
                    class_name=class_name,
                    priority=priority,
                    timeout_s=max(0.001, self._began + config.request_s - time.monotonic()),
                    session=ask.session.key,
                    salt=ask.salt,
                    stop=ask.stop,
                    moved=moved(ask.session.key, config.weights, placement, self.cluster),
                )
                for choice in range(ask.n)
            ]
            for place, prompt in enumerate(ask.prompts)
        ]

    def _shape(self) -> Shape:
        ask = self._ask
        make = ChatShape if ask.kind == "chat" else CompletionShape
        return make(
            self._fleet.text.tokenizer,
            ask.model,
            int(time.time()),
            include_usage=ask.include_usage,
            with_logprobs=ask.samplings[0].logprobs is not None,
        )

    def _observe(self, cluster: str, index: int) -> None:
        now, stats = time.monotonic(), self._fleet.stats
        if self.first_token_s is None:
            self.first_token_s = now - self._began
            stats.observe("time_to_first_token_seconds", self.class_name, cluster, self.first_token_s)
        if index in self._shown_at:
            stats.observe("inter_token_seconds", self.class_name, cluster, now - self._shown_at[index])
        self._shown_at[index] = now


def _resident_bytes(ask: Ask, model: ModelConfig) -> int:
    """Cache that all choices hold at their longest."""
    tokens = sum(len(prompt) + sampling.max_tokens for prompt, sampling in zip(ask.prompts, ask.samplings, strict=True))
    return ask.n * (tokens * model.token_bytes + len(ask.prompts) * model.state_bytes)


def _refusal(error: JobRefused) -> ApiError:
    """A cluster's refusal in the client's words. Its `invalid` begins with the field's name."""
    failed = error.failed
    match failed.kind:
        case "invalid":
            field, colon, _ = failed.message.partition(":")
            return ApiError(400, failed.message, outcome="invalid", param=field if colon else None)
        case "overloaded":
            seconds = max(1, ceil(failed.retry_after_s or 1))
            text = "The cluster of this session is at its capacity."
            return ApiError(429, text, outcome="overloaded", code="rate_limit_exceeded", retry_after_s=seconds)
        case "deadline":
            return ApiError(504, "The request took too long.", outcome="deadline", code="deadline")
        case "internal" | "no_workers":
            return ApiError(500, "The cluster failed to serve this request.", outcome="failed", code="internal")

"""The rows of `forebay bench engine`: an engine's passes, timed, beside their floors and what others published.

The model alone: no store, no handoff, no network. Decode starts from made-up contexts (random rows, keys and states, as
many as a prefill would have left: `made_contexts`), prefill from nothing, a warm prefill from a made-up prefix.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Protocol

import torch
from torch import Tensor

from forebay.kernels import floors
from forebay.kernels.floors import H200, Work
from forebay.kernels.shapes import ModelShape
from forebay.kvstore.layout import Layout
from forebay.ops.bench_report import Reference, Row
from forebay.workers import cache_rate
from forebay.workers.engine_plan import VLLM_DECODE, VLLM_PREFILL_S, VLLM_WARM_S, Mode, Plan, published
from forebay.workers.made_contexts import Contexts, empty_contexts

Shares = dict[str, float]
WARM_UPS = 3
ENOUGH_MS = 8e3


class Engine(Protocol):
    """What is measured: passes over contexts of its own pool. ids are int64 on the device."""

    mode: Mode

    @property
    def layout(self) -> Layout: ...
    def made_contexts(self, batch: int, tokens: int, capacity: int) -> Contexts:
        """As `made_contexts.made_contexts`, in the form that this engine reads."""
        ...

    def decoding(self, contexts: Contexts, ids: Tensor) -> Callable[[int], None]:
        """Greedy steps from ids [B]: a call makes n more of them, and returns when they are made."""
        ...

    def prefill(self, contexts: Contexts, ids: Tensor, start: int) -> int:
        """Tokens ids [T] of sequence 0 at `start` and after; the greedy token after them."""
        ...

    def chosen(self, contexts: Contexts, ids: Tensor) -> list[Tensor]:
        """Experts [B, k] that a step from ids chooses in each MoE layer."""
        ...

    def operators_ms(self, contexts: Contexts, ids: Tensor, steps: int) -> Shares:
        """A step's whole time by operator of `floors`, or several of them, joined by commas, and the rest by other
        names. Looking takes time itself: the sum is more than an unwatched step."""
        ...


@dataclass(frozen=True, slots=True)
class EngineBench:
    engine: Engine
    shape: ModelShape
    plan: Plan
    device: torch.device

    def decode(self) -> Iterator[Row]:
        for batch, tokens in self.plan.decode:
            yield from self._decode(batch, tokens)

    def _decode(self, batch: int, tokens: int) -> Iterator[Row]:
        steps = self.plan.steps
        contexts = self.engine.made_contexts(batch, tokens, tokens + WARM_UPS + steps + 1)
        ids = self._ids(batch, seed=batch)
        met = distinct(self.engine.chosen(contexts, ids))
        run = self.engine.decoding(contexts, ids)
        run(WARM_UPS)
        ms = self._ms(lambda: run(steps)) / steps
        work = floors.step_work(self.shape, batch, tokens, met)
        what = f"batch {batch}, made-up contexts of {count(tokens)}"
        vllm = VLLM_DECODE.get((batch, tokens))
        yield self._row(f"decode, {what}", batch / ms * 1e3, "tokens/s", published(self.shape, vllm))
        yield self._row(f"decode step, {what}", ms, "ms", self._floor(work))
        expected = floors.distinct_experts(self.shape.moe, batch)
        yield self._row(
            f"distinct experts a layer, {what}",
            met,
            f"of {self.shape.moe.experts}",
            Reference(name="expected", value=expected),
        )
        if (batch, tokens) in self.plan.profiled:
            yield from self._operators(self.engine.operators_ms(contexts, ids, self.plan.profiled_steps), work, what)

    def _operators(self, spent: Shares, work: dict[str, Work], what: str) -> Iterator[Row]:
        """The largest first."""
        for names, ms in sorted(spent.items(), key=lambda each: -each[1]):
            own = {name: work[name] for name in names.split(", ") if name in work}
            if ms > 0:
                reference = self._floor(own) if own else None
                yield self._row(f"part of a step, {what}: {names}", ms, "ms", reference)

    def prefill(self) -> Iterator[Row]:
        for tokens in self.plan.prefill:
            ms, what = self._repeated(partial(self._prefill_ms, tokens)), f"a prompt of {count(tokens)}"
            vllm = VLLM_PREFILL_S.get(tokens)
            rate = None if vllm is None else tokens / vllm
            yield self._row(f"prefill, {what}", tokens / ms * 1e3, "tokens/s", published(self.shape, rate))
            yield self._row(f"prefill time, {what}", ms, "ms", self._floor(floors.prefill_work(self.shape, 0, tokens)))
            yield from (
                self._row(f"{name}, {what}", value, "GB/s", None)
                for name, value in cache_rate.rates(self.shape, self.plan.block_tokens, tokens, ms / 1e3).items()
            )

    def _prefill_ms(self, tokens: int, seed: int) -> float:
        contexts = empty_contexts(self.engine.layout, self.device, 1, tokens)
        ids = self._ids(tokens, seed)
        return self._ms(lambda: self.engine.prefill(contexts, ids, 0))

    def warm(self) -> Iterator[Row]:
        prefix, new = self.plan.warm
        ms, what = self._repeated(self._warm_ms), f"{new} tokens after a made-up prefix of {count(prefix)}"
        vllm = VLLM_WARM_S.get(self.plan.warm)
        yield self._row(f"warm prefill, {what}", ms, "ms", published(self.shape, None if vllm is None else vllm * 1e3))
        least = self._floor(floors.prefill_work(self.shape, prefix, new))
        if least is not None:
            yield self._row(f"warm prefill beside its floor, {what}", ms, "ms", least)

    def _warm_ms(self, seed: int) -> float:
        prefix, new = self.plan.warm
        contexts, ids = self.engine.made_contexts(1, prefix, prefix + new), self._ids(new, seed)
        return self._ms(lambda: self.engine.prefill(contexts, ids, prefix))

    def _repeated(self, timed_ms: Callable[[int], float]) -> float:
        """The median of the plan's repeats, or of fewer where they take long; the first run does not count."""
        times = [timed_ms(seed) for seed in range(2)]
        while len(times) <= self.plan.repeats and sum(times) < ENOUGH_MS:
            times.append(timed_ms(len(times)))
        return median(times[1:])

    def _floor(self, work: dict[str, Work]) -> Reference | None:
        """What an H200 needs at least; nothing is known of a CPU."""
        if self.device.type != "cuda":
            return None
        return Reference(name=f"{H200.name} floor", value=floors.floor_ms(work, H200))

    def _ids(self, n: int, seed: int) -> Tensor:
        random = torch.Generator().manual_seed(seed)
        return torch.randint(0, self.shape.vocab, (n,), generator=random).to(self.device)

    def _ms(self, run: Callable[[], object]) -> float:
        """Wall time: the engine's own work between launches counts."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        before = time.perf_counter()
        run()
        return (time.perf_counter() - before) * 1e3

    def _row(self, name: str, value: float, unit: str, reference: Reference | None) -> Row:
        return Row(name=f"{name}, {self.engine.mode}", value=value, unit=unit, reference=reference)


def distinct(chosen: list[Tensor]) -> float:
    """Mean over MoE layers of how many experts a step met."""
    return sum(len(torch.unique(each)) for each in chosen) / len(chosen)


def count(tokens: int) -> str:
    """1024 as 1k."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)

"""One prefill and one decode worker in this process, and the way of a job between them: for checks, benches, tests.

It does what a cluster's ingress does, on values in one process: a decode slot first, then the prefill, then the
handoff; a preempted job is submitted again with its tokens forced.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import numpy as np

from forebay.kvstore.arena import Arena
from forebay.workers.config import WorkerConfig
from forebay.workers.decode import DecodeWorker
from forebay.workers.job import Failure, FinishReason, Holder, Job, TokenChoice
from forebay.workers.outcome import Emitted, Prefilled
from forebay.workers.prefill import PrefillWorker
from forebay.workers.sequence_model import SequenceModel, Watch

LOCAL = Holder(name="local", epoch=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer. `cached_tokens` and `computed_tokens` of the first prefill, should there have been several."""

    job_id: str
    tokens: tuple[TokenChoice, ...]
    finish: FinishReason
    cached_tokens: int
    computed_tokens: int
    miss: str | None

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token.id for token in self.tokens)


@dataclass(slots=True, eq=False)
class _Run:
    job: Job
    tokens: list[TokenChoice]
    first: Prefilled | None = None
    placed: bool = False

    def resubmitted(self) -> Job:
        ids = np.concatenate([self.job.ids, np.array([token.id for token in self.tokens], np.int32)])
        return replace(self.job, ids=ids)


class LocalPair:
    """A context manager: the arena's file is gone at its end. Time stands still inside, so nothing times out."""

    def __init__(
        self,
        model: SequenceModel,
        config: WorkerConfig,
        watch: Watch | None = None,
        prefill: Callable[[SequenceModel, WorkerConfig, Arena, Watch | None], PrefillWorker] = PrefillWorker,
    ) -> None:
        self._arena = Arena(config.store.run_dir, "local", config.store.handoff_bytes)
        self.prefill = prefill(model, config, self._arena, watch)
        self.decode = DecodeWorker(
            model,
            replace(config, store=replace(config.store, host_bytes=0, ssd_path=None, ssd_bytes=0, pool=None)),
            watch,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.prefill.close()
        self.decode.close()
        self._arena.close()

    def run(self, job: Job) -> Completion:
        """The whole answer of one job alone. It must be one that these workers can run."""
        completion = self.run_all([job])[0]
        assert isinstance(completion, Completion), completion
        return completion

    def run_all(
        self, jobs: Sequence[Job], on_tokens: Callable[[Emitted], None] | None = None
    ) -> list[Completion | Failure]:
        """All jobs at once, as far as slots reach; answers in the order of `jobs`. `on_tokens` hears as they come."""
        runs = {job.id: _Run(job, []) for job in jobs}
        ended: dict[str, Completion | Failure] = {}
        while len(ended) < len(jobs):
            live = {job_id: run for job_id, run in runs.items() if job_id not in ended}
            self._place(live, ended)
            for prefilled in self.prefill.step(0.0):
                self._hand_over(prefilled, live, ended)
            for emitted in self.decode.step(0.0):
                if isinstance(emitted, Emitted) and on_tokens is not None:
                    on_tokens(emitted)
                _collect(emitted, live, ended)
        return [ended[job.id] for job in jobs]

    def _place(self, live: dict[str, _Run], ended: dict[str, Completion | Failure]) -> None:
        """A slot and a place in the queue for every job that has none, or for as many as there is room."""
        for job_id, run in live.items():
            if run.placed:
                continue
            job = run.resubmitted()
            refused = self.decode.reserve(job_id, LOCAL, len(job.ids), 0.0)
            if refused is None and (refused := self.prefill.submit(job, LOCAL, 0.0)) is not None:
                self.decode.cancel(job_id)
            if refused is None:
                run.placed = True
            elif refused.kind != "overloaded" or not any(other.placed for other in live.values()):
                ended[job_id] = refused

    def _hand_over(
        self, outcome: Prefilled | Failure, live: dict[str, _Run], ended: dict[str, Completion | Failure]
    ) -> None:
        run = live[outcome.job_id]
        if isinstance(outcome, Prefilled):
            run.first = run.first or outcome
            failure = self.decode.start(run.resubmitted(), outcome, LOCAL, 0.0)
            self.prefill.release_handoff(outcome.job_id)
        else:
            failure = outcome
            self.decode.cancel(outcome.job_id)
        if failure is not None:
            ended[failure.job_id] = failure


def _collect(outcome: Emitted | Failure, live: dict[str, _Run], ended: dict[str, Completion | Failure]) -> None:
    run = live[outcome.job_id]
    if isinstance(outcome, Failure):
        if outcome.kind == "preempted":
            run.placed = False
        else:
            ended[outcome.job_id] = outcome
        return
    run.tokens += outcome.tokens
    if outcome.finish is not None:
        assert run.first is not None
        ended[outcome.job_id] = Completion(
            job_id=outcome.job_id,
            tokens=tuple(run.tokens),
            finish=outcome.finish,
            cached_tokens=run.first.cached_tokens,
            computed_tokens=run.first.computed_tokens,
            miss=run.first.miss,
        )

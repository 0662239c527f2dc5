"""Two workers without a model, behind the API of the real ones: the next token is a hash of the ids before it.

So what a stream must say is known without running it, wherever and however often it was moved.
"""

import dataclasses
import hashlib
import time
from typing import Any

import numpy as np

from forebay.kvstore.handoff import Handoff
from forebay.kvstore.store import StoreStats
from forebay.kvstore.totals import TierStats
from forebay.workers.job import Failure, Holder, Job, TokenChoice
from forebay.workers.outcome import Emitted, Prefilled, WorkerStats

VOCAB = 997


def next_token(ids: list[int], seed: int) -> int:
    digest = hashlib.sha256(np.array([seed, *ids], np.int64).tobytes()).digest()
    return int.from_bytes(digest[:8], "big") % VOCAB


def expected(job: Job) -> list[int]:
    """All tokens that the job must bring after its prompt."""
    ids = [int(token) for token in job.ids[: job.n_prompt]]
    for _ in range(job.sampling.max_tokens):
        ids.append(next_token(ids, job.seed))
    return ids[job.n_prompt :]


TIER = TierStats(tier="device", total_pages=8, free_pages=5, leased_pages=2, cached_pages=1, checkpoints=0)
STORE = StoreStats(
    tiers=(TIER,),
    page_bytes=4096,
    leases=0,
    looked_up_tokens=0,
    hit_tokens={},
    restored_bytes={"host": 3},
    restore_s={"ssd": 0.5},
    prefetched_bytes={"pool": 7},
    evicted_pages={("device", "dropped"): 2},
    misses={},
    refusals={},
)


def stats_of(**known: int) -> WorkerStats:
    names = [field.name for field in dataclasses.fields(WorkerStats) if field.name != "store"]
    return WorkerStats(**(dict.fromkeys(names, 0) | known), store=STORE)


class PlainPrefill:
    """One prompt a step, after `step_s`."""

    def __init__(self, step_s: float = 0.0, queue_jobs: int = 64) -> None:
        self.step_s, self.queue_jobs = step_s, queue_jobs
        self.queue: dict[str, tuple[Job, Holder]] = {}
        self.kept: dict[str, Holder] = {}
        self.ended: list[tuple[str, str]] = []
        self.over: list[str] = []

    def end_session(self, session: str) -> None:
        self.over.append(session)

    def turn_ended(self, session: str, stop: str) -> None:
        self.ended.append((session, stop))

    @property
    def busy(self) -> bool:
        return bool(self.queue)

    def submit(self, job: Job, holder: Holder, now: float) -> Failure | None:
        if len(self.queue) >= self.queue_jobs:
            return Failure(job_id=job.id, kind="overloaded", message="the queue is full")
        self.queue[job.id] = job, holder
        return None

    def step(self, now: float) -> list[Prefilled | Failure]:
        if not self.queue:
            return []
        time.sleep(self.step_s)
        job, holder = self.queue.pop(next(iter(self.queue)))
        self.kept[job.id] = holder
        first = None if job.n_forced else TokenChoice(id=next_token([int(i) for i in job.ids], job.seed))
        handoff = Handoff(id=job.id, path="", fingerprint="", n_tokens=job.n_prompt, pieces=())
        return [
            Prefilled(
                job_id=job.id, handoff=handoff, first=first, cached_tokens=0, computed_tokens=job.n_prompt, miss=None
            )
        ]

    def cancel(self, job_id: str) -> None:
        self.queue.pop(job_id, None)
        self.kept.pop(job_id, None)

    def release_handoff(self, job_id: str) -> None:
        self.kept.pop(job_id, None)

    def release_holder(self, holder: Holder) -> None:
        for job_id in [job_id for job_id, (_, owner) in self.queue.items() if owner == holder]:
            del self.queue[job_id]
        for job_id in [job_id for job_id, owner in self.kept.items() if owner == holder]:
            del self.kept[job_id]

    def stats(self) -> WorkerStats:
        return stats_of(jobs=len(self.queue), queued_jobs=len(self.queue), handoffs=len(self.kept))


class PlainDecode:
    """One token of every running job a step, after `step_s`."""

    def __init__(self, step_s: float = 0.001, slots: int = 4) -> None:
        self.step_s, self.n_slots = step_s, slots
        self.slots: dict[str, Holder] = {}
        self.running: dict[str, tuple[Job, list[int], list[TokenChoice]]] = {}
        self.hang = False

    @property
    def busy(self) -> bool:
        return bool(self.running)

    def reserve(self, job_id: str, holder: Holder, n_tokens: int, now: float) -> Failure | None:
        if len(self.slots) >= self.n_slots:
            return Failure(job_id=job_id, kind="overloaded", message="no slot")
        self.slots[job_id] = holder
        return None

    def start(self, job: Job, prefilled: Prefilled, holder: Holder, now: float) -> Failure | None:
        if self.slots.get(job.id) != holder:
            return Failure(job_id=job.id, kind="overloaded", message="no slot is reserved")
        ids, unsent = [int(token) for token in job.ids], []
        if prefilled.first is not None:
            ids.append(prefilled.first.id)
            unsent.append(prefilled.first)
        self.running[job.id] = job, ids, unsent
        return None

    def step(self, now: float) -> list[Any]:
        if self.running:
            time.sleep(self.step_s)
        while self.hang:
            time.sleep(0.01)
        return [self._advance(*entry) for entry in list(self.running.values())]

    def _advance(self, job: Job, ids: list[int], unsent: list[TokenChoice]) -> Emitted:
        tokens = tuple(unsent)
        unsent.clear()
        if not tokens:
            ids.append(next_token(ids, job.seed))
            tokens = (TokenChoice(id=ids[-1]),)
        finish = len(ids) - job.n_prompt >= job.sampling.max_tokens
        if finish:
            self.cancel(job.id)
        return Emitted(job_id=job.id, tokens=tokens, finish="length" if finish else None)

    def cancel(self, job_id: str) -> None:
        self.slots.pop(job_id, None)
        self.running.pop(job_id, None)

    def release_holder(self, holder: Holder) -> None:
        for job_id in [job_id for job_id, owner in self.slots.items() if owner == holder]:
            self.cancel(job_id)

    def stats(self) -> WorkerStats:
        return stats_of(jobs=len(self.running), slots=self.n_slots, slots_used=len(self.slots))

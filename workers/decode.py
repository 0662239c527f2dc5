"""The decode loop: slots, pages that grow, one batch of all running sequences a step.

A plain class: it owns a pool of pages (no prefix cache: what decode computed never matches) and a number of slots.
Not thread-safe; the caller keeps calls apart.

    reserve -> slot and pages promised --start: handoff adopted--> running --end, cancel, deadline, preemption--> gone
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from forebay.kvstore.handoff import HandoffError, adopt
from forebay.kvstore.memory import make_memory
from forebay.kvstore.store import Lease, Refusal
from forebay.workers.config import WorkerConfig
from forebay.workers.job import Failure, FailureKind, FinishReason, Holder, Job, TokenChoice
from forebay.workers.job_check import fault
from forebay.workers.outcome import Emitted, Prefilled, WorkerStats
from forebay.workers.sampling import Sampler, choose_all
from forebay.workers.schedule import RunningSequence, victim
from forebay.workers.sequence_model import SequenceModel, Watch
from forebay.workers.transfer import fetch_of


@dataclass(slots=True, kw_only=True, eq=False)
class _Slot:
    """A promise to one job: pages leased from the reservation on. `until_s`: when the promise or the job ends."""

    holder: Holder
    lease: Lease
    until_s: float
    sequence: "_Sequence | None" = None


@dataclass(slots=True, kw_only=True, eq=False)
class _Sequence:
    """Bytes of ids[:at] are in the pages. The next step feeds ids[at]; where at + 1 == len(ids) its row is sampled."""

    job: Job
    sampler: Sampler
    arrival: int
    ids: list[int]
    at: int
    unsent: tuple[TokenChoice, ...] = ()

    @property
    def generated(self) -> int:
        return len(self.ids) - self.job.n_prompt

    @property
    def finish(self) -> FinishReason | None:
        """A stop id ends it: sampling draws none before `min_tokens`."""
        if self.generated and self.ids[-1] in self.job.sampling.stop_ids:
            return "stop"
        return "length" if self.generated >= self.job.sampling.max_tokens else None

    def append(self, choice: TokenChoice) -> None:
        self.ids.append(choice.id)
        self.sampler.observe(choice.id)


class DecodeWorker:
    def __init__(self, model: SequenceModel, config: WorkerConfig, watch: Watch | None = None) -> None:
        torch.set_num_threads(config.threads)
        self._model, self._config, self._watch = model, config, watch
        self.memory = make_memory(model.layout, config.store, model.fingerprint.hex(), model.device)
        self._fetch = fetch_of(config)
        self._slots: dict[str, _Slot] = {}
        self._arrivals = 0
        self._totals = dict.fromkeys(("steps", "generated", "preemptions"), 0)

    @property
    def busy(self) -> bool:
        """Is there a sequence for `step` to advance? Reservations are none, but `step` lets them time out."""
        return any(slot.sequence is not None for slot in self._slots.values())

    def reserve(self, job_id: str, holder: Holder, n_tokens: int, now: float) -> Failure | None:
        """Promise a slot and pages for `n_tokens` (the job's ids) until `start`, `cancel` or a time-out.

        None: promised. `overloaded`: no slot or no pages at this moment. `invalid`: never here.
        """
        if job_id in self._slots:
            return Failure(job_id=job_id, kind="invalid", message=f"id: job {job_id} is here already")
        if len(self._slots) >= self._config.slots:
            return Failure(job_id=job_id, kind="overloaded", message=f"all {self._config.slots} slots are taken")
        lease = self.memory.open(holder, None, n_prompt=n_tokens, capacity_tokens=n_tokens + 1)
        if isinstance(lease, Refusal):
            kind: FailureKind = "invalid" if lease.kind == "too_large" else "overloaded"
            message = f"n_prompt: it takes {lease.needed_pages} pages, {lease.available_pages} are there"
            return Failure(job_id=job_id, kind=kind, message=message)
        until_s = now + self._config.reservation_timeout_s
        self._slots[job_id] = _Slot(holder=holder, lease=lease, until_s=until_s)
        return None

    def start(self, job: Job, prefilled: Prefilled, holder: Holder, now: float) -> Failure | None:
        """Adopt the handoff into the reserved pages. On a Failure the slot is given back.

        The exporter may release the handoff as soon as this returns.
        """
        slot = self._slots.get(job.id)
        if slot is None or slot.holder != holder or slot.sequence is not None:
            return Failure(job_id=job.id, kind="overloaded", message="no slot is reserved for it (any more)")
        failure = self._unfit(job, prefilled) or self._adopt(job, prefilled, slot)
        if failure is not None:
            self.cancel(job.id)
            return failure
        self._arrivals += 1
        sampler = Sampler(job, self._model.shape.vocab)
        sequence = _Sequence(job=job, sampler=sampler, arrival=self._arrivals, ids=job.ids.tolist(), at=job.n_prompt)
        if prefilled.first is not None:
            sequence.append(prefilled.first)
            sequence.unsent = (prefilled.first,)
        slot.sequence, slot.until_s = sequence, now + job.timeout_s
        return None

    def step(self, now: float) -> list[Emitted | Failure]:
        """First tokens that wait leave at once; otherwise one token of every running sequence is computed."""
        outcomes: list[Emitted | Failure] = list(self._past_deadline(now))
        waiting = [sequence for sequence in self._running() if sequence.unsent or sequence.finish]
        if waiting:
            return outcomes + [self._emit(sequence, sequence.unsent) for sequence in waiting]
        outcomes += self._make_room()
        batch = self._running()
        return outcomes + self._advance(batch) if batch else outcomes

    def cancel(self, job_id: str) -> None:
        """Give back a job's slot and pages, reserved or running; nothing if it is not here."""
        if (slot := self._slots.pop(job_id, None)) is not None:
            slot.lease.close()

    def release_holder(self, holder: Holder) -> None:
        """Give back all that this holder, or an earlier epoch of it, has here."""
        for job_id, slot in list(self._slots.items()):
            if slot.holder.name == holder.name and slot.holder.epoch <= holder.epoch:
                self.cancel(job_id)

    def close(self) -> None:
        """Give everything back and end the store's files."""
        for job_id in list(self._slots):
            self.cancel(job_id)
        self.memory.close()

    def stats(self) -> WorkerStats:
        return WorkerStats(
            jobs=len(self._running()),
            queued_jobs=0,
            queued_tokens=0,
            slots=self._config.slots,
            slots_used=len(self._slots),
            handoffs=0,
            handoff_bytes=0,
            exported_bytes=0,
            steps=self._totals["steps"],
            prompt_tokens=0,
            cached_tokens=0,
            computed_tokens=0,
            generated_tokens=self._totals["generated"],
            preemptions=self._totals["preemptions"],
            store=self.memory.store.stats(),
        )

    def _running(self) -> list[_Sequence]:
        return [slot.sequence for slot in self._slots.values() if slot.sequence is not None]

    def _unfit(self, job: Job, prefilled: Prefilled) -> Failure | None:
        """A job that would grow beyond the whole pool is refused now: it would only ever be preempted."""
        message = fault(job, self._model.shape.vocab, self._model.shape.context_tokens)
        pages = self._model.layout.pages_for(job.n_prompt + job.sampling.max_tokens) + self._model.layout.state_pages
        if message is None and pages > self.memory.pool.n_pages:
            message = f"max_tokens: prompt and answer take {pages} pages, this worker has {self.memory.pool.n_pages}"
        if message is not None:
            return Failure(job_id=job.id, kind="invalid", message=message)
        if prefilled.handoff.n_tokens != job.n_prompt or (prefilled.first is None) != (job.n_forced > 0):
            return Failure(job_id=job.id, kind="handoff", message="the handoff is not of this job")
        return None

    def _adopt(self, job: Job, prefilled: Prefilled, slot: _Slot) -> Failure | None:
        grown = self.memory.grow(slot.lease, len(job.ids) + 1) if slot.lease.capacity_tokens <= len(job.ids) else None
        if grown is not None:
            return Failure(job_id=job.id, kind="overloaded", message="the job is longer than its reservation")
        try:
            adopt(prefilled.handoff, self.memory.pool, slot.lease, self._model.fingerprint.hex(), self._fetch)
        except HandoffError as error:
            return Failure(job_id=job.id, kind="handoff", message=str(error))
        return None

    def _make_room(self) -> list[Failure]:
        """Pages for the next token of every running sequence; while they are used up, the victim is preempted."""
        preempted: list[Failure] = []
        for sequence in sorted(self._running(), key=lambda s: (s.job.priority, s.arrival)):
            while sequence.job.id in self._slots and not self._covers_next(sequence):
                loser = victim(_plain(self._running()))
                self._totals["preemptions"] += 1
                message = "pages were used up; submit it again with its tokens forced"
                preempted.append(self._fail(loser.job_id, "preempted", message))
        return preempted

    def _covers_next(self, sequence: _Sequence) -> bool:
        lease, needed = self._slots[sequence.job.id].lease, sequence.at + 1
        return lease.capacity_tokens >= needed or self.memory.grow(lease, needed) is None

    def _advance(self, batch: list[_Sequence]) -> list[Emitted | Failure]:
        ids = torch.tensor([s.ids[s.at] for s in batch], dtype=torch.int64, device=self._model.device)
        pages = [self._slots[s.job.id].lease.pages for s in batch]
        logits = self._model.decode(ids, [s.at for s in batch], pages, self.memory.pool)
        self._totals["steps"] += 1
        for sequence in batch:
            sequence.at += 1
        rows = [row for row, sequence in enumerate(batch) if sequence.at == len(sequence.ids)]
        return self._sample([batch[row] for row in rows], logits if len(rows) == len(batch) else logits[rows])

    def _sample(self, batch: list[_Sequence], logits: torch.Tensor) -> list[Emitted | Failure]:
        """Append a token to every sequence of `batch`: logits [len(batch), vocab]. (The others replay forced ids.)"""
        emitted: list[Emitted | Failure] = []
        for sequence, choice in zip(batch, self._choices(batch, logits), strict=True):
            sequence.append(choice)
            emitted.append(self._emit(sequence, (choice,)))
        return emitted

    def _choices(self, batch: list[_Sequence], logits: torch.Tensor) -> list[TokenChoice]:
        """One a row. Where all take the largest logit, only the ids leave the device."""
        samplers = [sequence.sampler for sequence in batch]
        if batch and self._watch is None and all(sampler.greedy for sampler in samplers):
            top, best = logits.max(1)
            told = torch.stack((top.double(), best.double())).cpu()
            assert told.isfinite().all(), "a row of logits has a largest finite value"
            return [TokenChoice(id=int(token)) for token in told[1].tolist()]
        rows = logits.cpu().numpy()
        if self._watch is not None:
            for sequence, row in zip(batch, rows, strict=True):
                self._watch(sequence.job.id, sequence.at, row)
        return choose_all(samplers, rows)

    def _emit(self, sequence: _Sequence, tokens: tuple[TokenChoice, ...]) -> Emitted:
        sequence.unsent = ()
        self._totals["generated"] += len(tokens)
        if sequence.finish is not None:
            self.cancel(sequence.job.id)
        return Emitted(job_id=sequence.job.id, tokens=tokens, finish=sequence.finish)

    def _past_deadline(self, now: float) -> list[Failure]:
        """Late jobs fail; late reservations go without a word, nobody waits for them here."""
        late = [(job_id, slot) for job_id, slot in self._slots.items() if now >= slot.until_s]
        for job_id in [job_id for job_id, slot in late if slot.sequence is None]:
            self.cancel(job_id)
        return [self._fail(i, "deadline", "its time was up while decoding") for i, slot in late if slot.sequence]

    def _fail(self, job_id: str, kind: FailureKind, message: str) -> Failure:
        self.cancel(job_id)
        return Failure(job_id=job_id, kind=kind, message=message)


def _plain(running: Iterable[_Sequence]) -> list[RunningSequence]:
    return [RunningSequence(job_id=s.job.id, priority=s.job.priority, arrival=s.arrival) for s in running]

"""The prefill loop: prompts come in, finished prompts wait in shared memory to be fetched by a decode worker.

A plain class: it owns a pool of pages with its prefix cache, a bounded queue, and the handoffs until they are fetched.
One `step` runs one chunk of one prompt. Not thread-safe; the caller keeps calls apart.

    submit -> queued --admitted: pages leased, hit restored--> chunks --end--> exported --release_handoff--> gone
                 \\________________ cancel, deadline, holder's end ____________/
"""

from dataclasses import dataclass
from heapq import nsmallest

import numpy as np
import numpy.typing as npt
import torch

from forebay.kvstore.ahead import Ahead
from forebay.kvstore.arena import Arena
from forebay.kvstore.chain import Chain
from forebay.kvstore.handoff import Handoff, HandoffArea
from forebay.kvstore.memory import make_memory
from forebay.kvstore.opening import Opening
from forebay.kvstore.store import Lease, Refusal
from forebay.kvstore.turn import Stop, Turn
from forebay.workers.canary import CANARY, HOLDER, Canary
from forebay.workers.config import WorkerConfig
from forebay.workers.job import Failure, FailureKind, Holder, Job, TokenChoice
from forebay.workers.job_check import fault
from forebay.workers.outcome import Prefilled, WorkerStats
from forebay.workers.sampling import Sampler
from forebay.workers.schedule import PrefillCandidate, Queued, chunk_end, next_ahead, prefill_order
from forebay.workers.sequence_model import SequenceModel, Watch
from forebay.workers.transfer import Offer

LOOKUPS_A_STEP = 8
AWAIT_S = 0.02
"""How long a step waits for bytes from slow tiers where nothing else is to be done."""


@dataclass(slots=True, kw_only=True, eq=False)
class Prompt:
    """A live job. With a lease, rows and state of ids[:at] are in its pages; `logits` are there when at == n_prompt.

    Without one, `at` is what a hit would have restored when it was last looked up, in step `looked_up`, `slow_bytes` of
    it from slow tiers; `ahead` is what comes up of those before its turn. With an `opening` its pages are leased, and
    bytes are on their way into them.
    """

    job: Job
    holder: Holder
    chain: Chain
    arrival: int
    submitted_s: float
    reuse: bool = True
    looked_up: int = 0
    at: int = 0
    slow_bytes: int = 0
    ahead: Ahead | None = None
    opening: Opening | None = None
    lease: Lease | None = None
    logits: npt.NDArray[np.float32] | None = None

    @property
    def deadline_s(self) -> float:
        return self.submitted_s + self.job.timeout_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    handoff: Handoff
    holder: Holder
    until_s: float


class PrefillWorker:
    def __init__(self, model: SequenceModel, config: WorkerConfig, arena: Arena, watch: Watch | None = None) -> None:
        """`arena` is this worker's own: it exports into it, decode workers read it."""
        torch.set_num_threads(config.threads)
        self._model, self._config, self._watch = model, config, watch
        self.memory = make_memory(model.layout, config.store, model.fingerprint.hex(), model.device)
        self._offer = Offer(config, arena)
        self._area = HandoffArea(arena, self.memory.pool, model.fingerprint.hex(), self._offer.peer)
        self._prompts: dict[str, Prompt] = {}
        self._kept: dict[str, _Kept] = {}
        self._canary = Canary(config.canary_s, model.shape.vocab, config.block_tokens)
        self._arrivals = 0
        self._stuck = self._asking = False
        self._totals = dict.fromkeys(("steps", "prompt", "cached", "computed", "exported"), 0)

    @property
    def busy(self) -> bool:
        """May a step now bring a job on? Not where all wait for pages or room in the arena, until something is let go.

        An idle worker is stepped now and then all the same: deadlines and time-outs pass in a step.
        """
        return bool(self._prompts) and not self._stuck

    def submit(self, job: Job, holder: Holder, now: float) -> Failure | None:
        """Queue `job`, or say at once why not. It is then live until a `step` returns its outcome, or it is let go."""
        self._drop(CANARY)
        message = fault(job, self._model.shape.vocab, self._model.shape.context_tokens)
        if message is None and (job.id in self._prompts or job.id in self._kept):
            message = f"id: job {job.id} is here already"
        if message is not None:
            return Failure(job_id=job.id, kind="invalid", message=message)
        if len(self._prompts) >= self._config.queue_jobs:
            return Failure(job_id=job.id, kind="overloaded", message=f"{len(self._prompts)} prompts wait already")
        self.memory.advance(now)
        self._enter(job, holder, now)
        return None

    def step(self, now: float) -> list[Prefilled | Failure]:
        """Let go what has timed out, run one chunk, export what is finished. [] while nothing ended."""
        self._drop_late_handoffs(now)
        ended: list[Prefilled | Failure] = list(self._past_deadline(now))
        self._bring_up()
        self.memory.advance(now)
        self.memory.settle()
        if not self._prompts and (job := self._canary.next_job(now)) is not None:
            self._enter(job, HOLDER, now, reuse=self._canary.is_warm)
        prompt, too_large = self._next(now)
        ended += too_large
        self._read_ahead(now)
        if prompt is not None:
            self._run_chunk(prompt)
        ended += self._export(now)
        self._stuck = prompt is None and not ended and not self._await()
        return ended

    def turn_ended(self, session: str, stop: Stop) -> None:
        """How the session's latest turn ended, which tells the eviction when the next one comes."""
        self.memory.store.turn_ended(session, stop)

    def end_session(self, session: str) -> None:
        """No turn of it comes any more. Idempotent."""
        self.memory.store.end_session(session)
        if self._config.store.purge_ended:
            self.memory.purge(session=session)

    def cancel(self, job_id: str) -> None:
        """Give back all of a job, at whatever stage it is; nothing if it is not here."""
        self._drop(job_id)
        self.release_handoff(job_id)

    def release_handoff(self, job_id: str) -> None:
        """The decode worker has its bytes (or will never come). Idempotent."""
        self._stuck = False
        if (kept := self._kept.pop(job_id, None)) is not None:
            self._area.release(kept.handoff.id)

    def release_holder(self, holder: Holder) -> None:
        """Give back all that this holder, or an earlier epoch of it, has here."""
        owned = {**{i: p.holder for i, p in self._prompts.items()}, **{i: k.holder for i, k in self._kept.items()}}
        for job_id, owner in owned.items():
            if owner.name == holder.name and owner.epoch <= holder.epoch:
                self.cancel(job_id)

    def close(self) -> None:
        """Give everything back and end the store's files."""
        for job_id in [*self._prompts, *self._kept]:
            self.cancel(job_id)
        self.memory.close()

    def stats(self) -> WorkerStats:
        prompts = [prompt for job_id, prompt in self._prompts.items() if job_id != CANARY]
        return WorkerStats(
            jobs=len(prompts),
            queued_jobs=sum(prompt.lease is None for prompt in prompts),
            queued_tokens=sum(prompt.job.n_prompt - prompt.at for prompt in prompts),
            slots=0,
            slots_used=0,
            handoffs=len(self._kept),
            handoff_bytes=sum(kept.handoff.n_bytes for kept in self._kept.values()),
            exported_bytes=self._totals["exported"],
            steps=self._totals["steps"],
            prompt_tokens=self._totals["prompt"],
            cached_tokens=self._totals["cached"],
            computed_tokens=self._totals["computed"],
            generated_tokens=0,
            preemptions=0,
            canary_passed=self._canary.passed,
            canary_failed=self._canary.failed,
            store=self.memory.store.stats(),
        )

    def _enter(self, job: Job, holder: Holder, now: float, *, reuse: bool = True) -> None:
        chain = self.memory.store.chain(job.ids[: job.n_prompt], job.salt, job.session)
        self._arrivals += 1
        self._stuck = False
        prompt = Prompt(job=job, holder=holder, chain=chain, arrival=self._arrivals, submitted_s=now, reuse=reuse)
        self._look_up(prompt)
        self._prompts[job.id] = prompt

    def _next(self, now: float) -> tuple[Prompt | None, list[Failure]]:
        """Whose chunk comes next, admitted; and the jobs that turned out never to fit.

        Nobody is admitted past a prompt that waits for pages, so that small ones cannot keep a large one out.
        """
        too_large: list[Failure] = []
        gate_open, self._asking = True, False
        self._look_up_again()
        for candidate in prefill_order(self._candidates(now), self._config.ageing_tokens_per_s):
            prompt = self._prompts[candidate.job_id]
            if prompt.opening is not None:
                continue
            if prompt.lease is not None:
                return prompt, too_large
            if self.memory.waits(prompt.chain):
                self._asking = True
                continue
            refusal = self._admit(prompt, now) if gate_open else None
            if prompt.lease is not None:
                return prompt, too_large
            if prompt.opening is not None:
                continue
            if refusal is not None and refusal.kind == "too_large":
                too_large.append(self._fail(prompt, "invalid", f"n_prompt: {_pages_message(refusal)}"))
            else:
                gate_open = False
        return None, too_large

    def _candidates(self, now: float) -> list[PrefillCandidate]:
        return [
            PrefillCandidate(
                job_id=job_id,
                priority=prompt.job.priority,
                remaining_tokens=prompt.job.n_prompt - prompt.at,
                waited_s=now - prompt.submitted_s,
                arrival=prompt.arrival,
            )
            for job_id, prompt in self._prompts.items()
            if prompt.logits is None
        ]

    def _look_up_again(self) -> None:
        """What others committed meanwhile may be a hit now. A few prompts a step, those not looked up for longest."""
        queued = (prompt for prompt in self._prompts.values() if prompt.lease is None and prompt.opening is None)
        for prompt in nsmallest(LOOKUPS_A_STEP, queued, key=lambda prompt: prompt.looked_up):
            self._look_up(prompt)

    def _look_up(self, prompt: Prompt) -> None:
        hit = self.memory.lookup(prompt.chain, prompt.job.n_prompt)
        prompt.at, prompt.slow_bytes, prompt.looked_up = hit.tokens, hit.slow_bytes, self._totals["steps"]

    def _admit(self, prompt: Prompt, now: float) -> Refusal | None:
        """Pin the hit, lease pages for the whole prompt, restore. All of it at once: admitted prompts can finish."""
        n_prompt = prompt.job.n_prompt
        prompt.opening = self.memory.begin(
            prompt.holder,
            prompt.chain if prompt.reuse else None,
            n_prompt=n_prompt,
            capacity_tokens=n_prompt,
            turn=_turn(prompt.job, now),
        )
        return self._restore(prompt)

    def _restore(self, prompt: Prompt) -> Refusal | None:
        """Go on with an opening as far as its bytes have come."""
        assert prompt.opening is not None
        answer = prompt.opening.poll()
        if answer is None:
            _end_ahead(prompt)
            return None
        prompt.opening = None
        if isinstance(answer, Refusal):
            return answer
        _end_ahead(prompt)
        self._arrive(prompt, answer)
        return None

    def _arrive(self, prompt: Prompt, lease: Lease) -> None:
        """The hit is in the lease's pages."""
        prompt.lease, prompt.at = lease, lease.hit_tokens

    def _bring_up(self) -> None:
        """What came from slow tiers meanwhile. A prompt that has to start cold after all, and cannot, waits again."""
        for prompt in self._prompts.values():
            if prompt.opening is not None:
                self._restore(prompt)
            elif prompt.ahead is not None:
                prompt.ahead.advance()

    def _read_ahead(self, now: float) -> None:
        """Have hits of prompts that wait for their turn come up to the host, beside the chunks of those before them.
        None is begun while one is read whose turn it is."""
        if any(prompt.opening is not None for prompt in self._prompts.values()):
            return
        most_bytes = min(self._config.prefetch_bytes, self._config.store.host_bytes // 2)
        waiting = [prompt for prompt in self._prompts.values() if prompt.lease is None and prompt.opening is None]
        if not most_bytes or not any(prompt.slow_bytes and prompt.ahead is None for prompt in waiting):
            return
        order = prefill_order(self._candidates(now), self._config.ageing_tokens_per_s)
        queue = [prompt for each in order if (prompt := self._prompts[each.job_id]) in waiting]
        while next_one := next_ahead(
            [_queued(prompt) for prompt in queue], bytes_max=most_bytes, prompts_max=self._config.prefetch_prompts
        ):
            job_id, n_bytes = next_one
            prompt = self._prompts[job_id]
            prompt.ahead = self.memory.ahead(prompt.chain, prompt.job.n_prompt, n_bytes)

    def _await(self) -> bool:
        """A moment's wait for what is on its way to some prompt. False where nothing is."""
        prompts = self._prompts.values()
        openings = [prompt.opening for prompt in prompts if prompt.opening is not None]
        aheads = [prompt.ahead for prompt in prompts if prompt.ahead is not None and not prompt.ahead.advance()]
        coming: list[Opening | Ahead] = [*openings, *aheads]
        if coming:
            coming[0].wait(AWAIT_S)
        elif self._asking:
            self.memory.wait(AWAIT_S)
        return bool(coming) or self._asking

    def _run_chunk(self, prompt: Prompt) -> None:
        """Compute the next chunk, then make its blocks matchable, then keep the state if the policy wants it here."""
        job, lease = prompt.job, prompt.lease
        assert lease is not None
        end = chunk_end(prompt.at, job.n_prompt, self._config.chunk_tokens, lease.checkpoints)
        ids = torch.from_numpy(job.ids[prompt.at : end].astype(np.int64)).to(self._model.device)
        logits = self._model.prefill(ids, prompt.at, lease.pages, self.memory.pool)
        self._totals["steps"] += 1
        self._totals["computed"] += end - prompt.at
        prompt.at = end
        self.memory.commit(lease, end)
        if end in lease.checkpoints:
            self.memory.checkpoint(lease, end)  # refused when no page is free: this end is not kept, the prompt goes on
        if end == job.n_prompt:
            prompt.logits = logits.cpu().numpy()

    def _export(self, now: float) -> list[Prefilled | Failure]:
        """Hand over finished prompts, oldest first, as the arena has room; the others keep their pages and wait."""
        ended: list[Prefilled | Failure] = []
        for prompt in [prompt for prompt in self._prompts.values() if prompt.logits is not None]:
            assert prompt.lease is not None
            if prompt.job.id == CANARY:
                self._judge(prompt, now)
                continue
            handoff = self._area.export(prompt.lease, prompt.job.n_prompt)
            if isinstance(handoff, Handoff):
                ended.append(self._finish(prompt, handoff, now))
            elif handoff.kind == "too_large":
                ended.append(self._fail(prompt, "invalid", "n_prompt: its handoff exceeds the worker's arena"))
        return ended

    def _judge(self, prompt: Prompt, now: float) -> None:
        assert prompt.lease is not None
        assert prompt.logits is not None
        self._canary.answered(prompt.logits, prompt.lease.hit, now)
        self._drop(CANARY)

    def _finish(self, prompt: Prompt, handoff: Handoff, now: float) -> Prefilled:
        job, lease = prompt.job, prompt.lease
        assert lease is not None
        until_s = min(prompt.deadline_s, now + self._config.handoff_timeout_s)
        self._kept[job.id] = _Kept(handoff=handoff, holder=prompt.holder, until_s=until_s)
        self._totals["exported"] += handoff.n_bytes
        self._totals["prompt"] += job.n_prompt
        self._totals["cached"] += lease.hit_tokens
        prefilled = Prefilled(
            job_id=job.id,
            handoff=handoff,
            first=None if job.n_forced else self._choose(prompt),
            cached_tokens=lease.hit_tokens,
            computed_tokens=job.n_prompt - lease.hit_tokens,
            miss=lease.hit.miss,
            tier_tokens=lease.hit.tier_tokens,
        )
        self._drop(job.id)
        return prefilled

    def _choose(self, prompt: Prompt) -> TokenChoice:
        assert prompt.logits is not None
        if self._watch is not None:
            self._watch(prompt.job.id, prompt.job.n_prompt, prompt.logits)
        return Sampler(prompt.job, self._model.shape.vocab).choose(prompt.logits)

    def _past_deadline(self, now: float) -> list[Failure]:
        late = [prompt for prompt in self._prompts.values() if now >= prompt.deadline_s]
        return [self._fail(prompt, "deadline", f"not prefilled within {prompt.job.timeout_s} s") for prompt in late]

    def _drop_late_handoffs(self, now: float) -> None:
        for job_id in [job_id for job_id, kept in self._kept.items() if now >= kept.until_s]:
            self.release_handoff(job_id)

    def _fail(self, prompt: Prompt, kind: FailureKind, message: str) -> Failure:
        self._drop(prompt.job.id)
        return Failure(job_id=prompt.job.id, kind=kind, message=message)

    def _drop(self, job_id: str) -> None:
        prompt = self._prompts.pop(job_id, None)
        if prompt is None:
            return
        _end_ahead(prompt)
        if prompt.opening is not None:
            prompt.opening.close()
        if prompt.lease is not None:
            prompt.lease.close()


def _end_ahead(prompt: Prompt) -> None:
    if prompt.ahead is not None:
        prompt.ahead.close()


def _queued(prompt: Prompt) -> Queued:
    ahead = prompt.ahead
    return Queued(
        job_id=prompt.job.id,
        slow_bytes=prompt.slow_bytes,
        ahead_bytes=None if ahead is None else ahead.total_bytes,
        coming=ahead is not None and ahead.coming,
    )


def _turn(job: Job, now: float) -> Turn:
    """Whose use of the blocks it is."""
    return Turn(
        session=job.session,
        stop=job.stop,
        class_name=job.class_name,
        moved=job.moved,
        again=bool(job.choice or job.n_forced),
        now=now,
    )


def _pages_message(refusal: Refusal) -> str:
    return f"it takes {refusal.needed_pages} pages, this worker has {refusal.available_pages}"

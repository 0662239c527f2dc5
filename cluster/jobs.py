"""One job, from its first submit to its last frame, over as many tries as it takes.

What was generated before a failure is forced in the next try: the client's stream goes on exactly where it stopped.
"""

import asyncio
import itertools
from collections.abc import Callable

from forebay.cluster.attempt import Attempt
from forebay.cluster.convert import to_job, to_wire
from forebay.cluster.dispatch import Again, Ending, what_next
from forebay.cluster.house import House
from forebay.cluster.messages import Begun
from forebay.router.wire import Finished, Frame, JobRequest, Started, Tokens
from forebay.workers.job import Failure, TokenChoice
from forebay.workers.outcome import Emitted

PATIENCE_S = 30.0
"""How long a job that lost its worker waits for a live one (a replacement takes seconds)."""

GRACE_S = 1.0
"""A worker ends a job at its deadline; this much later the ingress does."""


class JobRun:
    """`emit` takes each frame as it comes; the last one is `Finished` or `Failed`. Cancel the task to end the job."""

    def __init__(self, house: House, request: JobRequest, emit: Callable[[Frame], None]) -> None:
        self._house = house
        self._request = request
        self._emit = emit
        self._deadline = house.clock() + request.timeout_s
        self._generated: list[TokenChoice] = []
        self._started = False
        self._adopted = False
        """The present try has come as far as its decode worker."""

    async def run(self) -> None:
        tries = 0
        for attempt in itertools.count():
            ending = await self._attempt(f"{self._request.id}#{attempt}", first=attempt == 0)
            step = what_next(ending, tries, begun=self._started)
            if not isinstance(step, Again):
                return self._emit(Finished(reason=step) if isinstance(step, str) else step)
            tries += step.counts
            self._house.counts.retried("decode" if self._adopted else "prefill", step.reason)
            await asyncio.sleep(step.wait_s)
        raise AssertionError("count() does not end")

    async def _attempt(self, job_id: str, *, first: bool) -> Ending:
        remaining_s = self._deadline - self._house.clock()
        if remaining_s <= 0:
            return Failure(job_id=job_id, kind="deadline", message=f"not done in {self._request.timeout_s:g} s")
        self._adopted = False
        job = to_job(self._request, job_id, self._generated, remaining_s)
        attempt = Attempt(self._house, job, self._tell, patience_s=0.0 if first else PATIENCE_S)
        try:
            async with asyncio.timeout(remaining_s + GRACE_S):
                return await attempt.run()
        except TimeoutError:
            return Failure(job_id=job_id, kind="deadline", message="the worker did not keep the deadline")

    def _tell(self, event: Begun | Emitted) -> None:
        match event:
            case Emitted(tokens=tokens):
                self._generated += tokens
                if tokens:
                    self._emit(Tokens(tokens=[to_wire(token) for token in tokens]))
            case Begun(cached_tokens=cached, computed_tokens=computed, miss=miss):
                self._adopted = True
                self._house.counts.looked_up(self._request.class_name, self._request.n_prompt, event)
                if not self._started:
                    self._started = True
                    self._emit(Started(cached_tokens=cached, computed_tokens=computed, miss=miss))

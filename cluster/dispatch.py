"""Which worker a job goes to, and what follows when it ends badly. Pure functions of plain values.

| how a try ended                    | what follows                                              |
|------------------------------------|-----------------------------------------------------------|
| finished                           | the last frame                                            |
| a worker died, hung, lost a piece  | elsewhere, tokens so far forced; three such tries         |
| preempted                          | again, tokens so far forced; costs no try                 |
| Serve sent a call astray           | again at once; costs no try                               |
| a queue was full                   | `overloaded`; but a stream that has begun waits and goes on|
| invalid, deadline                  | the client is told                                        |
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import blake3

from forebay.cluster.registry import Entry
from forebay.router.wire import Failed, FailedKind
from forebay.workers.job import Failure, FailureKind, FinishReason

TRIES = 3
LostReason = Literal["died", "hangs", "silent", "unreachable", "misrouted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The worker did not end the job. `reason` is a metric label: `died` is known, `unreachable` is not.

    `unreachable` may mean the prefill worker where it says the decode worker: a promise was not kept.
    """

    worker: str
    reason: LostReason
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoWorker:
    """No live worker of the kind within the wait."""

    kind: Literal["prefill", "decode"]


Ending = FinishReason | Failure | Lost | NoWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """`counts`: it costs one of three tries. `wait_s`: bounded pause before it."""

    reason: str
    counts: bool
    wait_s: float = 0.0


def what_next(ending: Ending, tries: int, begun: bool) -> FinishReason | Again | Failed:
    """`tries`: how many counted before this one. `begun`: the client has seen the stream begin."""
    match ending:
        case "stop" | "length":
            return ending
        case Lost(reason="misrouted"):
            return Again(reason="misrouted", counts=False, wait_s=0.05)
        case Lost(worker=worker, reason=reason):
            return _once_more(reason, tries, f"worker {worker} {reason}")
        case NoWorker(kind=kind):
            return Failed(kind="no_workers", message=f"no live {kind} worker", retry_after_s=5.0)
        case Failure(kind=kind, message=message):
            return _after_failure(kind, message, tries, begun)


def _after_failure(kind: FailureKind, message: str, tries: int, begun: bool) -> Again | Failed:
    match kind:
        case "preempted":
            return Again(reason="preempted", counts=False, wait_s=0.05)
        case "overloaded" if begun:
            return Again(reason="overloaded", counts=False, wait_s=0.25)
        case "overloaded":
            return Failed(kind="overloaded", message=message, retry_after_s=1.0)
        case "invalid" | "deadline":
            return Failed(kind=kind, message=message)
        case "internal" | "handoff" | "cancelled":
            return _once_more(kind, tries, message)


def _once_more(reason: str, tries: int, message: str) -> Again | Failed:
    if tries + 1 < TRIES:
        return Again(reason=reason, counts=True)
    return Failed(kind="internal", message=f"{message} (try {TRIES} of {TRIES})")


def http_status(kind: FailedKind) -> int:
    """The status of a refusal before the first frame."""
    return {"invalid": 400, "overloaded": 429, "no_workers": 503, "deadline": 504, "internal": 500}[kind]


def choose_decode(workers: Mapping[str, Entry]) -> str | None:
    """The worker with most free slots; None where none is free."""
    best = max(workers, key=lambda name: (workers[name].free_slots, name), default=None)
    return best if best is not None and workers[best].free_slots > 0 else None


def choose_prefill(workers: Mapping[str, Entry], session: str, placed: str | None) -> str | None:
    """Where the session's cache is, while that worker lives; else the less laden of the session's two first.

    `placed` is where the session's last turn went. Rendezvous order spreads sessions evenly and moves few when the
    pool changes; the load decides between two, so one busy worker does not gather all new sessions.
    """
    if placed in workers:
        return placed
    if not workers:
        return None
    ranked = sorted(workers, key=lambda name: _score(session, name), reverse=True)
    return min(ranked[:2] if session else ranked, key=lambda name: _load(workers[name]))


def _score(session: str, worker: str) -> bytes:
    return blake3.blake3(f"{len(session)}:{session}{worker}".encode()).digest(length=8)


def _load(entry: Entry) -> tuple[int, int]:
    return entry.beat.pulse.stats.queued_tokens, len(entry.jobs)

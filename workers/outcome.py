"""What the workers answer with: values, never exceptions. The caller matches on their type."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forebay.kvstore.moves import Tier
from forebay.kvstore.store import StoreStats
from forebay.workers.job import FinishReason, TokenChoice

if TYPE_CHECKING:  # an ingress reads these values and has no torch
    from forebay.kvstore.handoff import Handoff


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """A prompt is computed and waits in the arena: valid until `release_handoff`, its holder's end, or its time-out.

    `first` is None where forced tokens follow the prompt. `miss` says why the hit was not longer, `tier_tokens` where
    the cached tokens lay.
    """

    job_id: str
    handoff: "Handoff"
    first: TokenChoice | None
    cached_tokens: int
    computed_tokens: int
    miss: str | None
    tier_tokens: dict[Tier, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitted:
    """New tokens of one job, in order; with `finish` set the last ones. A stop id is emitted like any other token."""

    job_id: str
    tokens: tuple[TokenChoice, ...]
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """Facts for the metrics. `jobs` are live; `slots_used` counts reservations too (0 of 0 in a prefill worker).

    `handoff_bytes` lie in the arena now, `exported_bytes` are all that ever did. `canary_passed` and `canary_failed`
    count resumes that were compared with cold runs; its own run is no job.
    """

    jobs: int
    queued_jobs: int
    queued_tokens: int
    slots: int
    slots_used: int
    handoffs: int
    handoff_bytes: int
    exported_bytes: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    generated_tokens: int
    preemptions: int
    canary_passed: int = 0
    canary_failed: int = 0
    store: StoreStats

"""What an ingress and its workers say to each other, as values."""

from dataclasses import dataclass

from forebay.kvstore.moves import Tier
from forebay.workers.job import Failure
from forebay.workers.outcome import Emitted


@dataclass(frozen=True, slots=True, kw_only=True)
class Misrouted:
    """The call was for another worker: nothing was taken."""

    wanted: str
    got: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A decode worker has adopted the job's handoff. The handoff can be released."""

    job_id: str
    cached_tokens: int
    computed_tokens: int
    miss: str | None
    tier_tokens: dict[Tier, int]


StepEvent = Begun | Emitted | Failure
StreamItem = list[StepEvent] | list[Misrouted]
"""What one step brought for one ingress; `Misrouted` where the stream was for another worker."""

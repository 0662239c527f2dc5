"""The heartbeat between a worker and its cluster's ingress: one call that registers, reports and answers.

The worker beats every 0.25 s; the ingress answers with the holder that its slots, leases and jobs belong to. No
answer for a second, or another epoch, means that the ingress which held them is gone: its jobs are freed.
"""

from dataclasses import dataclass, field
from typing import Literal

from forebay.cluster.step_loop import Pulse
from forebay.workers.job import Holder

Kind = Literal["prefill", "decode"]

PERIOD_S = 0.25
ANSWER_S = 0.5
"""How long one beat waits for its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """`worker` is the replica's id in Serve: what a call is pinned to. `pulse.turned_at` is the worker's own clock.

    `freed_after_s`: when an ingress was last found gone, how long after its last answer all that it held was free.
    """

    worker: str
    kind: Kind
    pid: int
    node: str
    pulse: Pulse
    stalled_s: float
    freed_after_s: float | None = None


@dataclass(slots=True)
class Heart:
    """What a worker concludes from answered and failed beats. The holder that a call returns is to be freed."""

    holder: Holder | None = None
    failed_beats: int = 0
    failing_since: float = field(default=0.0)

    def answered(self, holder: Holder) -> Holder | None:
        self.failed_beats = 0
        return self.adopt(holder)

    def admits(self, holder: Holder) -> bool:
        """May a call of this holder take anything? Not one of an epoch that is over: nobody would give it back."""
        return self.holder is None or holder.epoch >= self.holder.epoch

    def adopt(self, holder: Holder) -> Holder | None:
        """A call may bring a new epoch before a beat's answer does."""
        assert self.admits(holder), f"{holder} came after {self.holder}"
        before, self.holder = self.holder, holder
        return before if before != holder else None

    def failed(self, now: float) -> Holder | None:
        """At least three failed beats over at least a second free the holder: one lost beat or a pause does not."""
        if self.failed_beats == 0:
            self.failing_since = now
        self.failed_beats += 1
        if self.failed_beats < 3 or now - self.failing_since < 1.0:
            return None
        before, self.holder = self.holder, None
        return before

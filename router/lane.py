"""One class's place in one cluster's ledger: who waits, who was promised a place, and what is held.

A promise makes Retry-After true. Whoever is refused is told when its turn would come if all who wait and all who were
promised before it go first; the promise holds its place until then. A request of the same session at or after that time
goes to the front of the queue, and others were not let past if that would have kept it waiting for long. A promise
that nobody calls in within `PROMISE_S` lapses.

Places are held for at most `HELD_S` seconds of the class's rate, or a flood of clients that never come back would push
everybody's turn far away. Whoever is refused beyond that is told the same time and goes to the front as well when it
returns; only its place is not held, which matters where nearly all of a flood does come back.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from math import ceil

from forebay.router.config import ClassConfig

PROMISES_MAX = 256
PROMISE_S = 10.0
HELD_S = 10.0
TOLD_MAX = 65_536
HOLD_S = 10.0  # how long a request holds its bytes, before any has been seen to


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiter:
    """A request that may have to wait: `kept` when it comes to call a promise in."""

    id: int
    session: str
    tokens: int
    bytes: int
    kept: bool
    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """A place in time: from `due` on, `tokens` will be there within half the class's longest wait."""

    due: float
    tokens: int


@dataclass(slots=True)
class Lane:
    """`held_bytes` are of running requests, `reserved_tokens` of those whose prefill has not been settled."""

    config: ClassConfig
    queue: list[Waiter] = field(default_factory=list)  # kept promises first, each kind in order of arrival
    promises: dict[str, Promise] = field(default_factory=dict)  # by session: places that are held
    told: OrderedDict[str, float] = field(default_factory=OrderedDict)  # by session: when to return, no place held
    held_bytes: int = 0
    reserved_tokens: int = 0
    hold_s: float = HOLD_S

    def lapse(self, now: float) -> None:
        """Forget promises that were not called in."""
        if any(now >= each.due + PROMISE_S for each in self.promises.values()):
            self.promises = {key: each for key, each in self.promises.items() if now < each.due + PROMISE_S}
        while self.told and now >= next(iter(self.told.values())) + PROMISE_S:
            self.told.popitem(last=False)

    def call_in(self, session: str, now: float) -> bool:
        """Whether the session was told to return at this time; its promise is used up."""
        due = self._due(session)
        if due is None or now < due or not self.has_room(kept=True):
            return False
        self.forget(session)
        return True

    def forget(self, session: str) -> None:
        """The session has what it was promised."""
        self.promises.pop(session, None)
        self.told.pop(session, None)

    def backlog_tokens(self) -> int:
        """What goes before a newcomer."""
        return sum(each.tokens for each in self.queue) + sum(each.tokens for each in self.promises.values())

    def join(self, waiter: Waiter) -> int:
        """Enter the queue; returns the position, 0 first."""
        kept = sum(each.kept for each in self.queue)
        position = kept if waiter.kept else len(self.queue)
        self.queue.insert(position, waiter)
        return position

    def has_room(self, kept: bool) -> bool:
        taken = sum(each.kept == kept for each in self.queue)
        return taken < (PROMISES_MAX if kept else self.config.queue_requests)

    def goes_first(self, waiter: Waiter) -> bool:
        """Whether nobody stands before the waiter, who is not in the queue."""
        return not any(each.kept or not waiter.kept for each in self.queue)

    def promise(self, session: str, tokens: int, wait_s: float, now: float) -> int:
        """Promise a place after `wait_s`, or repeat the one promised before. Returns whole seconds, at least 1."""
        if (known := self._due(session)) is not None and known > now:
            return max(1, ceil(known - now))
        self.forget(session)
        seconds = max(1, ceil(wait_s))
        held_tokens = sum(each.tokens for each in self.promises.values())
        if len(self.promises) < PROMISES_MAX and held_tokens <= HELD_S * self.config.prefill_tokens_per_s:
            self.promises[session] = Promise(due=now + seconds, tokens=tokens)
        else:
            self.told[session] = now + seconds
            if len(self.told) > TOLD_MAX:
                self.told.popitem(last=False)
        return seconds

    def _due(self, session: str) -> float | None:
        promise = self.promises.get(session)
        return promise.due if promise else self.told.get(session)

    def keeps_promises(self, level: float, now: float) -> bool:
        """Whether every promise can be kept in time when the class's own bucket stands at `level`."""
        slack_s, rate = self.config.queue_wait_s / 2, self.config.prefill_tokens_per_s
        before = 0.0
        for promise in sorted(self.promises.values(), key=lambda each: each.due):
            need = min(promise.tokens, self.config.burst_tokens)
            if level + rate * max(0.0, promise.due + slack_s - now) < before + need:
                return False
            before += promise.tokens
        return True

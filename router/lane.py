"""One class's place in one cluster's ledger: who waits, who was promised a place, and what is held.

A promise makes Retry-After true. Whoever is refused is told when its turn would come if all who wait and all who were
promised before it go first; the promise holds its place until then, and for half the class's longest wait after. A
request of the same session in that time goes to the front of the queue, and others were not let past if that would have
kept it waiting for long.

Places are held for at most `HELD_S` seconds of the class's rate, or a flood of clients that never come back would push
everybody's turn far away. Whoever is refused beyond that is told a time all the same, and so was who comes later than
its place was held: it goes before all new requests and takes nothing that is held for others. It waits for as long as
that needs, and nothing new is held meanwhile. What was told lapses after `PROMISE_S`.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import IntEnum
from math import ceil

from forebay.router.config import ClassConfig

PROMISES_MAX = 256
PROMISE_S = 10.0
HELD_S = 10.0
TOLD_MAX = 65_536
HOLD_S = 10.0  # how long a request holds its bytes, before any has been seen to


class Standing(IntEnum):
    """What a request's session was told before; who stands lower goes first."""

    HELD = 0  # to come now, and its place is held
    TOLD = 1  # to come now
    NEW = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiter:
    """A request that may have to wait."""

    id: int
    session: str
    tokens: int
    bytes: int
    standing: Standing
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
    queue: list[Waiter] = field(default_factory=list)  # by standing, each in order of arrival
    promises: dict[str, Promise] = field(default_factory=dict)  # by session: places that are held
    told: OrderedDict[str, float] = field(default_factory=OrderedDict)  # by session: when to return, no place held
    held_bytes: int = 0
    reserved_tokens: int = 0
    hold_s: float = HOLD_S

    def lapse(self, now: float) -> None:
        """Hold no place for longer than for `_late_s`; forget who never came."""
        for session in [key for key, each in self.promises.items() if now >= each.due + self._late_s]:
            self.told[session] = self.promises.pop(session).due
        while self.told and now >= next(iter(self.told.values())) + PROMISE_S:
            self.told.popitem(last=False)

    def call_in(self, session: str, tokens: int, now: float) -> Standing:
        """What the session was told, if it comes at its time; that is used up. More than was held is not held."""
        due = self._due(session)
        if due is None or not due <= now < due + PROMISE_S or not self.has_room(Standing.TOLD):
            return Standing.NEW
        promise = self.promises.get(session)
        standing = Standing.HELD if promise and tokens <= promise.tokens else Standing.TOLD
        self.forget(session)
        return standing

    def forget(self, session: str) -> None:
        """The session has what it was promised."""
        self.promises.pop(session, None)
        self.told.pop(session, None)

    def backlog_tokens(self) -> int:
        """What goes before a newcomer."""
        return sum(each.tokens for each in self.queue) + sum(each.tokens for each in self.promises.values())

    def join(self, waiter: Waiter) -> int:
        """Enter the queue; returns the position, 0 first."""
        position = sum(each.standing <= waiter.standing for each in self.queue)
        self.queue.insert(position, waiter)
        return position

    def has_room(self, standing: Standing) -> bool:
        new = sum(each.standing is Standing.NEW for each in self.queue)
        if standing is Standing.NEW:
            return new < self.config.queue_requests
        return len(self.queue) - new < PROMISES_MAX

    def goes_first(self, waiter: Waiter) -> bool:
        """Whether nobody stands before the waiter, who is not in the queue."""
        return not any(each.standing <= waiter.standing for each in self.queue)

    def promise(self, session: str, tokens: int, wait_s: float, now: float) -> int:
        """Promise a place after `wait_s`, or repeat the one promised before. Returns whole seconds, at least 1."""
        if (known := self._due(session)) is not None and known > now:
            return max(1, ceil(known - now))
        self.forget(session)
        seconds = max(1, ceil(wait_s))
        if self._may_hold():
            self.promises[session] = Promise(due=now + seconds, tokens=tokens)
        else:
            self.told[session] = now + seconds
            if len(self.told) > TOLD_MAX:
                self.told.popitem(last=False)
        return seconds

    def held_until(self, now: float) -> float:
        """When the last place that is held now is free for others."""
        return max((each.due + self._late_s for each in self.promises.values()), default=now)

    def _may_hold(self) -> bool:
        held_tokens = sum(each.tokens for each in self.promises.values())
        told = any(each.standing is Standing.TOLD for each in self.queue)
        few = len(self.promises) < PROMISES_MAX and held_tokens <= HELD_S * self.config.prefill_tokens_per_s
        return few and not told

    def _due(self, session: str) -> float | None:
        promise = self.promises.get(session)
        return promise.due if promise else self.told.get(session)

    @property
    def _late_s(self) -> float:
        """How long after its time a promise may be called in, and how long it may then take, each at most."""
        return self.config.queue_wait_s / 2

    def keeps_promises(self, level: float, now: float) -> bool:
        """Whether every promise can be kept in time when the class's own bucket stands at `level`."""
        slack_s, rate = self._late_s, self.config.prefill_tokens_per_s
        before = 0.0
        for promise in sorted(self.promises.values(), key=lambda each: each.due):
            need = min(promise.tokens, self.config.burst_tokens)
            if level + rate * max(0.0, promise.due + slack_s - now) < before + need:
                return False
            before += promise.tokens
        return True

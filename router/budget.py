"""The ledger of one cluster: whether a request may start now, must wait, or is refused and for how long.

Each class has a rate of uncached prefill tokens (bucket.py: bursts, debt, lending) and a number of resident bytes.
Bytes are held for as long as an answer runs, so what was lent could not be taken back in bounded time: a class's
own bytes are never lent; `shared_bytes` are there for whichever class that borrows has used up its own.

A machine without I/O or clock: every call takes `now` in seconds of one monotonic clock. A ticket is the caller's from
`Granted` until `close`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from forebay.router.bucket import Buckets
from forebay.router.config import ClassConfig
from forebay.router.lane import Lane, Standing, Waiter

POLL_S = 0.05  # how often waiters are looked at, since the spare may come before their own tokens do
_HOLD_WEIGHT = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What a running request has reserved. `bytes` at most what the class can ever hold."""

    id: int
    class_name: str
    tokens: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Granted:
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Waiting:
    """In the queue under `id`; `admit` will grant or refuse it."""

    id: int
    position: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Over budget. A request of the same session is admitted when it is sent after this many seconds."""

    retry_after_s: int


Decision = Granted | Waiting | Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneView:
    """A class's state in one cluster, for metrics."""

    class_name: str
    level_tokens: float
    reserved_tokens: int
    reserved_bytes: int
    queued: int


@dataclass(slots=True)
class _Open:
    ticket: Ticket
    borrowed: float
    since: float
    settled: bool = False


class Ledger:
    def __init__(self, classes: Sequence[ClassConfig], spare_s: float, shared_bytes: int, now: float) -> None:
        self._buckets = Buckets(classes, spare_s, now)
        self._lanes = {each.name: Lane(each) for each in sorted(classes, key=lambda each: each.priority)}
        self._shared_bytes = shared_bytes
        self._open: dict[int, _Open] = {}
        self._ids = count(1)

    def reserve(self, class_name: str, session: str, tokens: int, nbytes: int, now: float) -> Decision:
        """Ask for `tokens` of uncached prefill and `nbytes` of resident cache."""
        lane = self._advance(now)[class_name]
        waiter = Waiter(
            id=next(self._ids),
            session=session,
            tokens=tokens,
            bytes=min(nbytes, lane.config.resident_bytes + self._shared_for(lane)),
            standing=lane.call_in(session, tokens, now),
            until=now + lane.config.queue_wait_s,
        )
        if lane.goes_first(waiter) and self._grantable(lane, waiter, now):
            return Granted(self._grant(lane, waiter, now))
        wait_s = self._wait_s(lane, waiter, now)
        if waiter.standing is not Standing.NEW:
            until = waiter.until + wait_s + lane.held_until(now) - now
            return Waiting(waiter.id, lane.join(replace(waiter, until=until)))
        if lane.has_room(Standing.NEW) and wait_s <= lane.config.queue_wait_s:
            return Waiting(waiter.id, lane.join(waiter))
        return self._refuse(lane, waiter, now)

    def admit(self, now: float) -> list[tuple[int, Granted | Refused]]:
        """Grant whom the budget admits by now, refuse whose wait is over; the class of lowest priority value first."""
        decisions: list[tuple[int, Granted | Refused]] = []
        for lane in self._advance(now).values():
            while lane.queue and self._grantable(lane, lane.queue[0], now):
                waiter = lane.queue.pop(0)
                decisions.append((waiter.id, Granted(self._grant(lane, waiter, now))))
            late = [each for each in lane.queue if each.until <= now]
            lane.queue = [each for each in lane.queue if each.until > now]
            decisions += [(each.id, self._refuse(lane, each, now)) for each in late]
        return decisions

    def next_at(self, now: float) -> float | None:
        """When `admit` should be called again though nothing was closed; None while nobody waits."""
        ends = [each.until for lane in self._lanes.values() for each in lane.queue]
        return min(*ends, now + POLL_S) if ends else None

    def abandon(self, waiting_id: int) -> None:
        """The waiter has gone away."""
        for lane in self._lanes.values():
            lane.queue = [each for each in lane.queue if each.id != waiting_id]

    def settle(self, ticket: Ticket, computed_tokens: int, now: float) -> None:
        """Prefill computed so many tokens: give the rest back, or note the debt. Once a ticket."""
        lane, entry = self._advance(now)[ticket.class_name], self._open[ticket.id]
        assert not entry.settled, "a ticket is settled once"
        entry.settled = True
        lane.reserved_tokens -= ticket.tokens
        if computed_tokens <= ticket.tokens:
            self._buckets.give_back(ticket.class_name, ticket.tokens - computed_tokens, entry.borrowed)
        else:
            self._buckets.owe(ticket.class_name, computed_tokens - ticket.tokens)

    def close(self, ticket: Ticket, now: float) -> None:
        """The request is over. One that was never settled is charged what it reserved."""
        lane, entry = self._advance(now)[ticket.class_name], self._open.pop(ticket.id)
        lane.held_bytes -= ticket.bytes
        lane.hold_s += _HOLD_WEIGHT * (max(0.0, now - entry.since) - lane.hold_s)
        if not entry.settled:
            lane.reserved_tokens -= ticket.tokens

    def view(self, now: float) -> list[LaneView]:
        return [
            LaneView(
                class_name=name,
                level_tokens=self._buckets.level(name),
                reserved_tokens=lane.reserved_tokens,
                reserved_bytes=lane.held_bytes,
                queued=len(lane.queue),
            )
            for name, lane in self._advance(now).items()
        ]

    def check(self) -> None:
        """Assert the ledger's laws: sums over open tickets, bounds of bytes, queues and promises."""
        self._buckets.check()
        for name, lane in self._lanes.items():
            entries = [each for each in self._open.values() if each.ticket.class_name == name]
            assert lane.held_bytes == sum(each.ticket.bytes for each in entries)
            assert lane.reserved_tokens == sum(each.ticket.tokens for each in entries if not each.settled)
            assert sum(each.standing is Standing.NEW for each in lane.queue) <= lane.config.queue_requests
        assert sum(self._shared_used(lane) for lane in self._lanes.values()) <= self._shared_bytes

    def _advance(self, now: float) -> dict[str, Lane]:
        self._buckets.refill(now)
        for lane in self._lanes.values():
            lane.lapse(now)
        return self._lanes

    def _grantable(self, lane: Lane, waiter: Waiter, now: float) -> bool:
        name = lane.config.name
        if not (self._fits(lane, waiter.bytes) and self._buckets.affordable(name, waiter.tokens)):
            return False
        after = self._buckets.level(name) - self._buckets.own_part(name, waiter.tokens)
        return waiter.standing is Standing.HELD or lane.keeps_promises(after, now)

    def _grant(self, lane: Lane, waiter: Waiter, now: float) -> Ticket:
        ticket = Ticket(id=waiter.id, class_name=lane.config.name, tokens=waiter.tokens, bytes=waiter.bytes)
        self._open[ticket.id] = _Open(ticket, self._buckets.take(ticket.class_name, ticket.tokens), now)
        lane.held_bytes += ticket.bytes
        lane.reserved_tokens += ticket.tokens
        lane.forget(waiter.session)
        return ticket

    def _refuse(self, lane: Lane, waiter: Waiter, now: float) -> Refused:
        return Refused(lane.promise(waiter.session, waiter.tokens, self._wait_s(lane, waiter, now), now))

    def _shared_used(self, lane: Lane) -> int:
        return max(0, lane.held_bytes - lane.config.resident_bytes)

    def _fits(self, lane: Lane, nbytes: int) -> bool:
        return lane.held_bytes + nbytes <= self._bytes_limit(lane)

    def _bytes_limit(self, lane: Lane) -> int:
        others = sum(self._shared_used(each) for each in self._lanes.values() if each is not lane)
        return lane.config.resident_bytes + max(0, self._shared_for(lane) - others)

    def _shared_for(self, lane: Lane) -> int:
        return self._shared_bytes if lane.config.borrows else 0

    def _wait_s(self, lane: Lane, waiter: Waiter, now: float) -> float:
        """Until the waiter's turn, by the class's own rate alone: the spare can only make it shorter."""
        name = lane.config.name
        missing = lane.backlog_tokens() + self._buckets.need(name, waiter.tokens) - self._buckets.level(name)
        return max(0.0, missing / lane.config.prefill_tokens_per_s, self._bytes_wait_s(lane, waiter, now))

    def _bytes_wait_s(self, lane: Lane, waiter: Waiter, now: float) -> float:
        """Until enough bytes are free, if running requests hold theirs as long as others of the class did."""
        wanted = lane.held_bytes + waiter.bytes + sum(each.bytes for each in lane.queue)
        missing = wanted - self._bytes_limit(lane)
        wait_s = 0.0
        for ends_at, nbytes in self._releases(lane):
            if missing <= 0:
                break
            missing, wait_s = missing - nbytes, max(0.0, ends_at - now)
        return wait_s if missing <= 0 else wait_s + lane.hold_s

    def _releases(self, lane: Lane) -> Iterator[tuple[float, int]]:
        for entry in self._open.values():  # in order of admission
            if entry.ticket.class_name == lane.config.name:
                yield entry.since + lane.hold_s, entry.ticket.bytes

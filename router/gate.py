"""The ledger of one cluster with time and tasks around it: a request waits here until its ticket is granted."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from forebay.router.budget import Granted, LaneView, Ledger, Refused, Ticket, Waiting
from forebay.router.config import ClassConfig
from forebay.router.outcome import Outcome


class OverBudget(Exception):
    """The class is over its budget in the cluster; `outcome` says whether the request was let into its queue."""

    def __init__(self, retry_after_s: int, outcome: Outcome) -> None:
        super().__init__(f"over budget, retry after {retry_after_s} s")
        self.retry_after_s = retry_after_s
        self.outcome: Outcome = outcome


class Admitted:
    """A ticket in use: settle it when prefill has told what it computed. Settling twice counts once."""

    def __init__(self, ledger: Ledger, ticket: Ticket, clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._ticket = ticket
        self._clock = clock
        self._settled = False

    def settle(self, computed_tokens: int) -> None:
        if not self._settled:
            self._settled = True
            self._ledger.settle(self._ticket, computed_tokens, self._clock())


class Gate:
    def __init__(
        self,
        classes: Sequence[ClassConfig],
        spare_s: float,
        shared_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._ledger = Ledger(classes, spare_s, shared_bytes, clock())
        self._waiting: dict[int, asyncio.Future[Granted | Refused]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def admit(self, class_name: str, session: str, tokens: int, nbytes: int) -> AsyncIterator[Admitted]:
        """Wait for `tokens` of uncached prefill and `nbytes` of cache, held until the context ends.

        Raises OverBudget at once, or when the class's longest wait is over.
        """
        ticket = await self._ticket(class_name, session, tokens, nbytes)
        try:
            yield Admitted(self._ledger, ticket, self._clock)
        finally:
            self._close(ticket)

    def view(self) -> list[LaneView]:
        return self._ledger.view(self._clock())

    async def _ticket(self, class_name: str, session: str, tokens: int, nbytes: int) -> Ticket:
        match self._ledger.reserve(class_name, session, tokens, nbytes, self._clock()):
            case Granted(ticket):
                return ticket
            case Refused(retry_after_s):
                raise OverBudget(retry_after_s, "over_budget")
            case Waiting(waiting_id):
                return await self._wait(waiting_id)

    async def _wait(self, waiting_id: int) -> Ticket:
        future: asyncio.Future[Granted | Refused]
        future = self._waiting[waiting_id] = asyncio.get_running_loop().create_future()
        self._arm()
        try:
            decision = await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._undo(future.result())  # it came in the same turn of the loop as the cancellation
            raise
        finally:
            self._waiting.pop(waiting_id, None)
            self._ledger.abandon(waiting_id)
        if isinstance(decision, Refused):
            raise OverBudget(decision.retry_after_s, "queue_deadline")
        return decision.ticket

    def _close(self, ticket: Ticket) -> None:
        self._ledger.close(ticket, self._clock())
        self._pump()

    def _pump(self) -> None:
        for waiting_id, decision in self._ledger.admit(self._clock()):
            future = self._waiting.pop(waiting_id)
            if future.cancelled():
                self._undo(decision)
            else:
                future.set_result(decision)
        self._arm()

    def _undo(self, decision: Granted | Refused) -> None:
        """Nobody is there any more to use what was granted: all of it goes back."""
        if isinstance(decision, Granted):
            self._ledger.settle(decision.ticket, 0, self._clock())
            self._ledger.close(decision.ticket, self._clock())

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._clock()
        if (at := self._ledger.next_at(now)) is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.001, at - now), self._pump)

"""A request on its way in: its pages are leased, and what lies in slow tiers is being read into them."""

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Protocol

import numpy as np
import numpy.typing as npt

from forebay.kvstore.lease import Lease, Refusal
from forebay.kvstore.moves import TIERS, Move, Pages, Tier

RESTORES_MAX = 8
"""Restores of one request that may find wrong bytes before it starts cold."""


class Restoring(Protocol):
    """Bytes come up from a slow tier in the background. `wrong`: pages there whose bytes are not what was saved;
    `gone`: those that are not there any more."""

    @property
    def tier(self) -> Tier: ...
    @property
    def wrong(self) -> list[int]: ...
    @property
    def gone(self) -> list[int]: ...
    def advance(self) -> bool:
        """Go on. True once nothing more comes, and so it stays."""
        ...

    def wait(self, timeout_s: float | None) -> None:
        """Until `advance` has something to do."""
        ...


class Target(Protocol):
    """Where bytes that come up go: the device's pages, or the host's."""

    def scatter(self, pages: Pages, data: npt.NDArray[np.uint8]) -> None:
        """Write [n, n_bytes] over the first bytes of each page."""
        ...


class Bytes(Protocol):
    """What carries out moves: `memory.Memory`."""

    def carry_out(self, moves: list[Move]) -> tuple[Tier, list[int]] | None: ...
    def restore(self, moves: list[Move]) -> Sequence[Restoring]: ...
    def drop_corrupt(self, tier: Tier, pages: list[int]) -> None: ...
    def lose(self, tier: Tier, pages: list[int]) -> None: ...
    def settle(self) -> None: ...
    def count_restore(self, tier: Tier, seconds: float) -> None: ...


class Opening:
    """`poll` until it answers. What is wrong or gone on the way is dropped, and the rest of the hit taken instead."""

    def __init__(self, memory: Bytes, open_lease: Callable[[bool], Lease | Refusal]) -> None:
        """`open_lease(reuse)` leases anew; without `reuse` it looks nothing up."""
        self._memory = memory
        self._open_lease = open_lease
        self._tries = 0
        self._began_s = monotonic()
        self._lease: Lease | None = None
        self._restoring: Sequence[Restoring] = ()
        self._answer: Lease | Refusal | None = None
        self._start()

    def poll(self) -> Lease | Refusal | None:
        """The lease, with the hit's rows and state in its pages; why there is none; or None while bytes come up."""
        while self._answer is None:
            assert self._lease is not None
            if self._lease.closed or self._coming():
                return None
            if failed := [each for each in self._restoring if each.wrong or each.gone]:
                self._lease.close()
                for each in failed:
                    self._memory.drop_corrupt(each.tier, each.wrong)
                    self._memory.lose(each.tier, each.gone)
                self._memory.settle()
                self._start()
            else:
                self._memory.settle()  # what could not be saved is not to match, not even for a moment
                self._count(self._lease)
                self._lease.ready()
                self._answer = self._lease
        return self._answer

    def wait(self, timeout_s: float | None) -> None:
        """Until `poll` has something to do, or the time is over."""
        live = self._answer is None and self._lease is not None and not self._lease.closed
        if live and (coming := self._coming()):
            coming[0].wait(timeout_s)

    def close(self) -> None:
        """Give it up, or the lease that came of it. What is still read is thrown away."""
        if self._lease is not None:
            self._lease.close()

    def _coming(self) -> list[Restoring]:
        """Those of which more is to come; all go on."""
        return [each for each in self._restoring if not each.advance()]

    def _count(self, lease: Lease) -> None:
        if lease.hit.tokens:
            tiers = [*lease.hit.tier_tokens, *([lease.hit.state_tier] if lease.hit.state_tier else [])]
            lowest = max(tiers, key=TIERS.index)
            if lowest != "device":
                self._memory.count_restore(lowest, monotonic() - self._began_s)

    def _start(self) -> None:
        """Lease, and carry out all but the slow reads, which go into pages that nobody else knows."""
        while self._answer is None:
            lease = self._open_lease(self._tries < RESTORES_MAX)
            self._tries += 1
            if isinstance(lease, Refusal):
                self._answer = lease
                return
            wrong = self._memory.carry_out(lease.moves)
            if wrong is None:
                self._lease, self._restoring = lease, self._memory.restore(lease.moves)
                return
            lease.close()
            self._memory.drop_corrupt(*wrong)

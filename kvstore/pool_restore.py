"""A request's bytes on their way up from the cluster-wide pool."""

from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from time import monotonic
from typing import Any

from forebay.kvstore.moves import Pages, Tier
from forebay.kvstore.opening import Target
from forebay.kvstore.pool_fetch import Fetched
from forebay.kvstore.pool_object import PoolObject
from forebay.kvstore.pool_traffic import PoolTraffic


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reading:
    """The `taken` rows of an object go to `target_pages`, the first `n_bytes` of each. `unit` None: it is nowhere."""

    unit: PoolObject | None
    taken: list[int]
    source_pages: Pages
    target_pages: Pages
    n_bytes: int


class PoolRestore:
    """The reads of one request: see `opening.Restoring`. One batch is fetched while the one before is taken."""

    tier: Tier = "pool"

    def __init__(self, traffic: PoolTraffic, target: Target, readings: list[Reading], read_s: float) -> None:
        self.wrong: list[int] = []
        self.gone: list[int] = [page for each in readings if each.unit is None for page in each.source_pages.tolist()]
        self._traffic, self._target, self._read_s = traffic, target, read_s
        batches = [] if self.gone else _batches(readings, traffic.batch_bytes)
        self._to_read = batches[::-1]
        self._reading: list[tuple[list[Reading], Future[list[Fetched]]]] = []
        self._rest: Future[list[str]] | None = None
        self._until_s = monotonic() + read_s
        self._read_on()

    def advance(self) -> bool:
        while self._reading:
            readings, answer = self._reading[0]
            if not answer.done():
                if monotonic() < self._late_s:
                    return False
                return self._give_up(readings)
            del self._reading[0]
            for reading, fetched in zip(readings, answer.result(), strict=True):
                self._take(reading, fetched)
            self._until_s = monotonic() + self._read_s
            self._read_on()
        return self._look_at_the_rest()

    def wait(self, timeout_s: float | None) -> None:
        coming: list[Future[Any]] = [answer for _, answer in self._reading[:1]]
        if self._rest is not None:
            coming.append(self._rest)
        if coming:
            left_s = max(0.0, self._late_s - monotonic())
            wait_for(coming, left_s if timeout_s is None else min(left_s, timeout_s), "FIRST_COMPLETED")

    @property
    def _late_s(self) -> float:
        """When to do without. What comes for others meanwhile is progress."""
        return max(self._until_s, self._traffic.fetched_s + self._read_s)

    def _take(self, reading: Reading, fetched: Fetched) -> None:
        if fetched.rows is not None:
            self._target.scatter(reading.target_pages, fetched.rows[reading.taken, : reading.n_bytes])
        elif fetched.trouble == "corrupt":
            self.wrong += reading.source_pages.tolist()
        else:
            self.gone += reading.source_pages.tolist()

    def _give_up(self, readings: list[Reading]) -> bool:
        """Too late. What is still on its way goes nowhere."""
        for reading in readings:
            self.gone += reading.source_pages.tolist()
        self._reading, self._to_read = [], []
        return True

    def _read_on(self) -> None:
        """Nothing more once a part is missing: the request starts again, with what is then known."""
        while self._to_read and len(self._reading) < 2 and not self.wrong and not self.gone:
            readings = self._to_read.pop()
            units = [reading.unit for reading in readings if reading.unit is not None]
            self._reading.append((readings, self._traffic.read(units)))

    def _look_at_the_rest(self) -> bool:
        """Where one is gone others may be too: better known now than found out one new start after the other."""
        if not self.gone or not self._to_read:
            return True
        rest = [reading for batch in self._to_read for reading in batch]
        if self._rest is None:
            self._rest = self._traffic.ask_for([reading.unit.name for reading in rest if reading.unit is not None])
        if not self._rest.done():
            return monotonic() >= self._late_s
        missing = set(self._rest.result())
        for reading in rest:
            if reading.unit is not None and reading.unit.name in missing:
                self.gone += reading.source_pages.tolist()
        self._to_read = []
        return True


def _batches(readings: list[Reading], most_bytes: int) -> list[list[Reading]]:
    """In order, `most_bytes` together at most, or one alone."""
    batches: list[list[Reading]] = []
    left = 0
    for reading in readings:
        assert reading.unit is not None
        n_bytes = reading.unit.total_bytes + 64
        if n_bytes > left or not batches:
            batches.append([])
            left = most_bytes
        batches[-1].append(reading)
        left -= n_bytes
    return batches

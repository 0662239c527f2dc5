"""A histogram as plain numbers, for rooms that observe and must not know a metrics library."""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Observations so far. `counts[i]` fell in (bounds[i-1], bounds[i]]; the last count is above every bound."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    def __post_init__(self) -> None:
        assert len(self.counts) == len(self.bounds) + 1

    @property
    def count(self) -> int:
        return sum(self.counts)


class Histogram:
    """Counts observations by bucket. `bounds` are inclusive upper bounds, ascending, without +Inf."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        assert bounds, "a histogram has at least one bound"
        assert all(a < b for a, b in pairwise(bounds)), "bounds ascend"
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def snapshot(self) -> Snapshot:
        return Snapshot(bounds=self._bounds, counts=tuple(self._counts), sum=self._sum)

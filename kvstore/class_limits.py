"""What each class of requests may keep: how many pages of a tier, and for how long after their last use.

Decisions only. `tiers.py` carries them out for the device and the SSD, `directory.py` for the host, which is the
node's. Time is that of the turns, which `advance` brings; before the first one nothing is old.
"""

import heapq
from collections.abc import Mapping, Sequence
from itertools import count
from math import inf

from forebay.kvstore.config import ClassShare
from forebay.kvstore.index import TierIndex, Unit
from forebay.kvstore.moves import Tier

SPARE_DUE = 1024
"""The units that are due are listed anew when so many more, and twice as many, are listed as there are."""


class ClassLimits:
    """`now`: seconds of the latest turn, None before the first."""

    def __init__(self, classes: Sequence[ClassShare], page_bytes: int) -> None:
        self.now: float | None = None
        self._ttl_s = {each.name: each.ttl_s for each in classes if each.ttl_s is not None}
        self._pages: dict[Tier, dict[str, int]] = {
            "device": quota_pages({each.name: each.device_bytes for each in classes}, page_bytes),
            "ssd": quota_pages({each.name: each.ssd_bytes for each in classes}, page_bytes),
        }
        self._due: list[tuple[float, int, TierIndex, Unit]] = []
        self._undated: list[tuple[TierIndex, Unit]] = []
        self._number = count()

    @property
    def has_ttl(self) -> bool:
        return bool(self._ttl_s)

    def pages(self, tier: Tier) -> dict[str, int]:
        """The quotas of the device or the SSD, of the classes that have one there."""
        return self._pages.get(tier, {})

    def excess(self, tier: TierIndex, class_name: str, n_pages: int = 0) -> int:
        """By how many pages the class would exceed its quota there with `n_pages` more: not more than 0 where not."""
        quota = self.pages(tier.tier).get(class_name)
        return 0 if quota is None else tier.held_pages[class_name] + n_pages - quota

    def cached_excess(self, tier: TierIndex) -> dict[str, int]:
        """Of the classes whose cached pages exceed their quota: by how many."""
        quotas = self.pages(tier.tier)
        over = {name: tier.cached_pages[name] - quota for name, quota in quotas.items()}
        return {name: n_pages for name, n_pages in over.items() if n_pages > 0}

    def until(self, class_name: str) -> float:
        """When what such a request uses now goes. A class without a name keeps things as long as there is room."""
        ttl_s = self._ttl_s.get(class_name)
        if ttl_s is None:
            return inf
        return (0.0 if self.now is None else self.now) + ttl_s

    def date(self, tier: TierIndex, unit: Unit) -> None:
        """It was stored now."""
        unit.expires_at = self.until(unit.origin.class_name)
        self.watch(tier, unit)

    def watch(self, tier: TierIndex, unit: Unit) -> None:
        """A unit of the device or the SSD comes up in `expired` when its time is over."""
        if unit.expires_at == inf or tier.tier not in ("device", "ssd"):
            return
        if self.now is None:
            self._undated.append((tier, unit))
            return
        heapq.heappush(self._due, (unit.expires_at, next(self._number), tier, unit))
        if len(self._due) > 2 * sum(len(each.units) for each in {entry[2] for entry in self._due}) + SPARE_DUE:
            self._due = [entry for entry in self._due if entry[3] in entry[2].units]
            heapq.heapify(self._due)

    def renew(self, unit: Unit, class_name: str) -> None:
        """A request of this class used it now. It is watched already if it can expire at all."""
        unit.expires_at = max(unit.expires_at, self.until(class_name))

    def advance(self, now: float) -> None:
        """What was found at the start is as if used when the first turn came."""
        self.now = now if self.now is None else max(self.now, now)
        undated, self._undated = self._undated, []
        for tier, unit in undated:
            self.date(tier, unit)

    def expired(self) -> list[tuple[TierIndex, Unit]]:
        """Units that match, and that nobody used for too long. They are to go."""
        assert self.now is not None
        gone, later = [], []
        while self._due and self._due[0][0] <= self.now:
            _, _, tier, unit = heapq.heappop(self._due)
            if unit in tier.units and unit.expires_at > self.now:
                later.append((tier, unit))
            elif unit in tier.units:
                gone.append((tier, unit))
        for tier, unit in later:
            self.watch(tier, unit)
        return gone


def quota_pages(quotas: Mapping[str, int | None], page_bytes: int) -> dict[str, int]:
    """Whole pages of each class that has a quota."""
    return {name: n_bytes // page_bytes for name, n_bytes in quotas.items() if n_bytes is not None}

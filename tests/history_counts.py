"""What random histories of the store met: how many events, which hits, which faults."""

import statistics
from collections import Counter
from dataclasses import dataclass, field

from forebay.kvstore.lookup import Hit
from forebay.kvstore.totals import StoreStats


@dataclass
class HistoryCounts:
    """`events` per history. `hits` by the tiers a hit's rows and state came from: one hit may count in several."""

    events: list[int] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    evicted_pages: Counter[str] = field(default_factory=Counter)

    def event(self, name: str, *, fault: bool = False) -> None:
        self.events[-1] += 1
        (self.faults if fault else self.kinds)[name] += 1

    def hit(self, hit: Hit) -> None:
        if hit.tokens:
            self.hits.update({*hit.tier_tokens, *([hit.state_tier] if hit.state_tier else [])})
        if hit.miss is not None:
            self.misses[hit.miss] += 1

    def end(self, stats: StoreStats) -> None:
        self.evicted_pages.update({f"{tier} {cause}": n for (tier, cause), n in stats.evicted_pages.items()})

    def add(self, other: "HistoryCounts") -> None:
        self.events += other.events
        for ours, theirs in zip(self._counters(), other._counters(), strict=True):
            ours[1].update(theirs[1])

    @property
    def median_events(self) -> float:
        return float(statistics.median(self.events))

    def told(self, name: str) -> str:
        head = f"{name}: {len(self.events)} histories, {sum(self.events)} events, median {self.median_events:g}"
        return "\n".join([head, *(f"  {of}: {_told(counter)}" for of, counter in self._counters() if counter)])

    def _counters(self) -> list[tuple[str, Counter[str]]]:
        return [
            ("hits by tier", self.hits),
            ("misses by reason", self.misses),
            ("faults", self.faults),
            ("other events", self.kinds),
            ("evicted pages", self.evicted_pages),
        ]


def _told(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {n}" for name, n in counter.most_common())

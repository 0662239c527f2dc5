"""What a store counts, and what it tells."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from forebay.kvstore.lookup import Hit, MissReason
from forebay.kvstore.moves import TIERS, Move, Tier

EvictionCause = Literal["saved", "dropped", "quota", "expired", "purged", "corrupt", "sibling_missing", "failed"]
"""saved: a lower tier has it. dropped: room was needed. quota: its class had too much there. expired: nobody used it
for as long as its class keeps things. purged: its session or tenant was. corrupt, sibling_missing: it could not be
restored any more. failed: its tier is off."""

SsdEvent = Literal["skipped", "failed", "torn", "damaged", "other_version"]
"""skipped: a write, since the queue was full. failed: the disk, so the tier is off. The others: what a restart found in
the log that is no record, and where not all of one was there."""

PoolEvent = Literal["skipped", "full", "unreachable", "failed", "gone", "corrupt"]
"""Of the pool. skipped: a write, since the queue was full or nobody was joined yet. full: a write, there was no room.
unreachable: its master did not answer. failed: any other call. gone: a read of what was evicted, or whose holder died.
corrupt: a read of wrong bytes, which were removed."""


@dataclass(slots=True, kw_only=True)
class Totals:
    """Running totals since the start. Only requests count, probes do not."""

    looked_up_tokens: int = 0
    hit_tokens: Counter[Tier] = field(default_factory=Counter)
    restored_bytes: Counter[Tier] = field(default_factory=Counter)
    restore_s: dict[Tier, float] = field(default_factory=lambda: defaultdict(float))
    prefetched_bytes: Counter[Tier] = field(default_factory=Counter)
    evicted_pages: Counter[tuple[Tier, EvictionCause]] = field(default_factory=Counter)
    misses: Counter[MissReason] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    ssd_events: Counter[SsdEvent] = field(default_factory=Counter)
    pool_events: Counter[PoolEvent] = field(default_factory=Counter)

    def count(self, n_prompt: int, hit: Hit, moves: Sequence[Move]) -> None:
        """One request's look-up and restore, once its bytes are there."""
        self.looked_up_tokens += n_prompt
        self.hit_tokens.update(hit.tier_tokens)
        if hit.miss is not None:
            self.misses[hit.miss] += 1
        for move in moves:
            if move.source is not None and TIERS.index(move.source) > TIERS.index(move.target):
                self.restored_bytes[move.source] += len(move.target_pages) * move.n_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """Pages of one tier: free + leased + cached == total. `checkpoints` can be resumed from.

    The host tier is the node's: one of its workers tells of its pages, the others of none.
    """

    tier: Tier
    total_pages: int
    free_pages: int
    leased_pages: int
    cached_pages: int
    checkpoints: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Facts of one store. Tokens and misses count requests; `evicted_pages` by tier and cause; bytes by source tier."""

    tiers: tuple[TierStats, ...]
    page_bytes: int
    leases: int
    looked_up_tokens: int
    hit_tokens: dict[Tier, int]
    restored_bytes: dict[Tier, int]
    evicted_pages: dict[tuple[Tier, EvictionCause], int]
    misses: dict[MissReason, int]
    refusals: dict[str, int]
    restore_s: dict[Tier, float] = field(default_factory=dict)
    """From a request's turn until its hit was in device memory, by the lowest tier that some of it came from."""

    prefetched_bytes: dict[Tier, int] = field(default_factory=dict)
    """Brought up into the host while their prompts waited for their turn, by source tier; not in `restored_bytes`."""

    ssd_events: dict[SsdEvent, int] = field(default_factory=dict)
    ssd_held_bytes: int = 0
    """Of the SSD tier's segments; never more than its quota."""

    ssd_queued_bytes: int = 0
    """On their way to the SSD."""

    pool_events: dict[PoolEvent, int] = field(default_factory=dict)
    pool_queued_bytes: int = 0
    """On their way to the pool."""

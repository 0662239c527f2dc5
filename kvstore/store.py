"""The store of one worker: which prefixes can be reused, and who holds which pages. Accounting only.

    hit = store.lookup(chain, n_prompt)                            a probe: changes nothing
    lease = store.open(holder, chain, n_prompt=.., capacity_tokens=..)
    lease.moves carried out, lease.ready()                         now the hit's rows and state are in the lease's pages
    lease.commit(upto), lease.checkpoint(at) ..., lease.close()    rows computed meanwhile stay behind, cached

`memory.py` does the same with the bytes moved along. One thread at a time.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from forebay.kvstore.below import Below
from forebay.kvstore.chain import Chain
from forebay.kvstore.chains import Chains
from forebay.kvstore.config import StoreConfig
from forebay.kvstore.index import Checkpoint, TierIndex, Unit
from forebay.kvstore.layout import Layout
from forebay.kvstore.lease import Holder, Lease, Refusal
from forebay.kvstore.lookup import Found, Hit, MissReason
from forebay.kvstore.moves import Label, Pages, Tier, mark_of
from forebay.kvstore.tiers import Tiers
from forebay.kvstore.totals import PoolEvent, SsdEvent, StoreStats, TierStats
from forebay.kvstore.turn import Stop, Turn

__all__ = ["Hit", "Holder", "Lease", "MissReason", "Refusal", "Store", "StoreStats"]


class Store:
    def __init__(self, layout: Layout, config: StoreConfig, fingerprint: str) -> None:
        """`fingerprint` names weights, dtype and layout: keys made under another one are never found."""
        self.layout = layout
        self.fingerprint = fingerprint
        self._tiers = Tiers(layout, config, fingerprint)
        self._leases: set[Lease] = set()
        self._below: set[Below] = set()
        self._chains = Chains(layout.block_tokens, fingerprint)
        self._ssd_held_bytes = self._ssd_queued_bytes = self._pool_queued_bytes = 0
        self._host_pages: tuple[int, int, int] | None = None

    def chain(self, ids: Sequence[int] | npt.NDArray[np.int32], salt: str = "", session: str = "") -> Chain:
        """Block keys of a prompt. Different `salt`s (tenants) never share a block. Of a `session` that is known only
        what the prompt adds to its last one is hashed."""
        return self._chains.chain(ids, salt, session)

    def lookup(self, chain: Chain, n_prompt: int) -> Hit:
        """The hit that `open` would restore now. Nothing is pinned or renewed."""
        return self._tiers.lookup.find(chain, n_prompt).hit

    def open(
        self,
        holder: Holder,
        chain: Chain | None,
        *,
        n_prompt: int,
        capacity_tokens: int,
        reuse: bool = True,
        turn: Turn | None = None,
    ) -> Lease | Refusal:
        """Lease pages for `capacity_tokens` tokens and a running state, the longest hit in them after its moves.

        `chain` None: nothing is looked up and nothing can be committed. `reuse` False: looks nothing up. `turn` says
        whose use it is: the eviction learns from it, and its class is charged with what it stores. Where the pool
        cannot hold the pages and the pinned hit at once, the request starts cold rather than never.
        """
        assert 0 < n_prompt <= capacity_tokens
        lookup = self._tiers.lookup
        if turn is not None:
            self._tiers.history.advance(turn.now)
            self.advance(turn.now)
        found = lookup.find(chain, n_prompt) if reuse else lookup.nothing("corrupt")
        if turn is not None and turn.moved and found.hit.miss == "never_stored":
            found = replace(found, hit=replace(found.hit, miss="wrong_cluster"))
        opened = self._start(holder, chain, found, n_prompt, capacity_tokens, turn)
        if isinstance(opened, Refusal) and found.hit.tokens:
            opened = self._start(holder, chain, lookup.nothing("evicted"), n_prompt, capacity_tokens, turn)
        if isinstance(opened, Refusal):
            self._tiers.totals.refusals[opened.kind] += 1
        return opened

    def below(self, chain: Chain, n_prompt: int, most_bytes: int) -> Below:
        """What the prompt's hit has in slow tiers, up to so many bytes: for who copies it into the host before the
        prompt's turn comes. A probe: it renews nothing."""
        below = Below(self._tiers.below(self._tiers.lookup.find(chain, n_prompt), most_bytes), self._below.discard)
        self._below.add(below)
        return below

    def advance(self, now: float) -> bool:
        """Time has come to `now`, in seconds of the turns' clock: what its class keeps no longer goes. False where
        nothing ever does."""
        return self._tiers.advance(now)

    def purge(self, *, session: str | None = None, salt: str | None = None) -> int:
        """Forget what the session alone has used, or all that was stored under the tenant's salt. Returns how many
        pages that ends. What other sessions use too stays, page by page: rows before the place in a page where two
        sessions part stay with the one that is not purged, if it wrote on there."""
        marks = None if session is None else mark_of(session), None if salt is None else mark_of(salt)
        self._chains.forget(*marks)
        return self._tiers.purge(*marks)

    def take_gone_for_good(self, tier: Tier) -> list[int]:
        """Pages there whose bytes nobody is to find again, since the last call."""
        return self._tiers.gone_for_good.take(tier)

    def take_shared(self, tier: Tier) -> list[int]:
        """Pages there that one session alone had used, and others do now, since the last call."""
        return self._tiers.sharing.take(tier)

    def turn_ended(self, session: str, stop: Stop) -> None:
        """How the session's latest turn here ended, which tells when the next one comes."""
        self._tiers.history.ended(session, stop)

    def end_session(self, session: str) -> None:
        """No turn of it comes any more: what it alone has used is given up before all else, in every tier here."""
        self._tiers.history.end_session(session)

    def release_holder(self, holder: Holder) -> int:
        """Close every lease of that name whose epoch is not newer. Returns how many."""
        owned = [
            lease for lease in self._leases if lease.holder.name == holder.name and lease.holder.epoch <= holder.epoch
        ]
        for lease in owned:
            lease.close()
        return len(owned)

    def adopt(self, tier: Tier, label: Label) -> Pages | None:
        """A unit that another process left in a lower tier: it matches from now on, on these pages of that tier. None
        where a longer run or the same checkpoint is there, or all pages are pinned. The oldest makes room."""
        return self._tiers.adopt(tier, label)

    def lose(self, tier: Tier, pages: Sequence[int]) -> None:
        """What lies in these pages is given up by what holds the bytes. What does not match yet never will."""
        lost = set(pages)
        index = self._tiers.of(tier)
        for unit in [unit for unit in index.units if not lost.isdisjoint(unit.pages.tolist())]:
            if unit.entered:
                self._tiers.drop(index, unit, "evicted", "saved" if self._tiers.is_below(index, unit) else "dropped")
            else:
                unit.lost = True

    def spill(self, label: Label, uses: int, expires_at: float) -> Pages | None:
        """A unit that leaves the host, used so often, kept until then: its pages on the SSD, where its bytes are to go
        before anything else happens, or None where they are not."""
        return self._tiers.spill(label, uses, expires_at)

    def turn_off_ssd(self) -> None:
        """The disk failed: nothing there matches any more, and nothing is saved there."""
        self._tiers.totals.ssd_events["failed"] += 1
        self._tiers.turn_off_ssd()

    def tier_pages(self, tier: Tier) -> int:
        return self._tiers.of(tier).pool.total

    def pinned(self, tier: Tier) -> list[int]:
        """Pages there that are being read or written for a lease."""
        return [page for unit in self._tiers.of(tier).units if unit.pins for page in unit.pages.tolist()]

    def note_ssd(self, events: Mapping[SsdEvent, int], *, held_bytes: int, queued_bytes: int) -> None:
        """What the log on the SSD has counted since its start, and how much it holds."""
        self._tiers.totals.ssd_events.update(
            {name: n - self._tiers.totals.ssd_events[name] for name, n in events.items()}
        )
        self._ssd_held_bytes, self._ssd_queued_bytes = held_bytes, queued_bytes

    def note_host(self, *, free: int, used: int, cached: int) -> None:
        """Pages of the arena that this worker tells of: those of its view are numbers only."""
        self._host_pages = free, used, cached

    def note_pool(self, events: Mapping[PoolEvent, int], *, queued_bytes: int) -> None:
        """What the traffic with the pool has counted since its start, and how much is on its way there."""
        self._tiers.totals.pool_events.update(
            {name: n - self._tiers.totals.pool_events[name] for name, n in events.items()}
        )
        self._pool_queued_bytes = queued_bytes

    def count_restore(self, tier: Tier, seconds: float) -> None:
        """A request waited so long for the bytes of its hit, the lowest of which lay in that tier."""
        self._tiers.totals.restore_s[tier] += seconds

    def count_prefetch(self, tier: Tier, n_bytes: int) -> None:
        """So much came up from that tier into the host before its prompt's turn."""
        self._tiers.totals.prefetched_bytes[tier] += n_bytes

    def drop_corrupt(self, tier: Tier, pages: Sequence[int]) -> None:
        """The bytes of these pages are wrong: what lies in them never matches again, nor do its siblings."""
        wrong = set(pages)
        index = self._tiers.of(tier)
        for unit in [unit for unit in index.units if unit.entered and not wrong.isdisjoint(unit.pages.tolist())]:
            if isinstance(unit, Checkpoint):
                self._tiers.drop_checkpoint(unit.key, "corrupt", "corrupt")
            else:
                self._tiers.drop(index, unit, "corrupt", "corrupt")

    def drop_checkpoint(self, key: bytes) -> None:
        """One KDA group's part of this checkpoint is gone somewhere: the others go with it, in every tier."""
        self._tiers.drop_checkpoint(key, "sibling_missing", "sibling_missing")

    def check(self) -> None:
        """Assert that pages add up and that every pin has its lease, or copy on its way up. For tests; reads
        everything."""
        pins: Counter[tuple[TierIndex, Unit]] = Counter(pin for lease in self._leases for pin in lease.pins)
        pins.update(pin for below in self._below for pin in below.pins)
        assert not self._tiers.limits.cached_excess(self._tiers.device), "no class keeps more than its quota"
        assert all(self._tiers.limits.excess(self._tiers.ssd, name) <= 0 for name in self._tiers.limits.pages("ssd"))
        for tier in self._tiers.order:
            tier.check()
            for unit in tier.units:
                assert unit.pins == pins.pop((tier, unit), 0), "as many pins as were given"
        assert not pins, "only what exists is pinned"

    def stats(self) -> StoreStats:
        totals = self._tiers.totals
        return StoreStats(
            tiers=tuple(self._tier_stats(tier) for tier in self._tiers.order),
            page_bytes=self.layout.page_bytes,
            leases=len(self._leases),
            looked_up_tokens=totals.looked_up_tokens,
            hit_tokens=dict(totals.hit_tokens),
            restored_bytes=dict(totals.restored_bytes),
            restore_s=dict(totals.restore_s),
            prefetched_bytes=dict(totals.prefetched_bytes),
            evicted_pages=dict(totals.evicted_pages),
            misses=dict(totals.misses),
            refusals=dict(totals.refusals),
            ssd_events=dict(totals.ssd_events),
            ssd_held_bytes=self._ssd_held_bytes,
            ssd_queued_bytes=self._ssd_queued_bytes,
            pool_events=dict(totals.pool_events),
            pool_queued_bytes=self._pool_queued_bytes,
        )

    def _start(
        self,
        holder: Holder,
        chain: Chain | None,
        found: Found,
        n_prompt: int,
        capacity_tokens: int,
        turn: Turn | None,
    ) -> Lease | Refusal:
        lease = Lease(self._tiers, holder, chain, found.hit, self._leases.discard, turn)
        refusal = lease.start(found, n_prompt=n_prompt, capacity_tokens=capacity_tokens)
        if refusal is not None:
            lease.close()
            return refusal
        self._leases.add(lease)
        return lease

    def _tier_stats(self, tier: TierIndex) -> TierStats:
        free, leased, cached = tier.pool.free, tier.pool.leased, tier.pool.cached
        if tier is self._tiers.host and self._host_pages is not None:
            free, leased, cached = self._host_pages
        return TierStats(
            tier=tier.tier,
            total_pages=free + leased + cached,
            free_pages=free,
            leased_pages=leased,
            cached_pages=cached,
            checkpoints=len(tier.checkpoints),
        )

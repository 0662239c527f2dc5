"""The tiers of one worker: device pages above host pages, the SSD and the pool, and the eviction that makes room.

Making room answers with values: the moves that save what is worth saving, and the saved units, which match only after
the moves were carried out.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf

import numpy as np

from forebay.kvstore.class_limits import ClassLimits
from forebay.kvstore.config import StoreConfig
from forebay.kvstore.eviction import Valuation, least
from forebay.kvstore.for_good import GoneForGood
from forebay.kvstore.history import History
from forebay.kvstore.index import Checkpoint, Span, TierIndex, Unit, keys_of
from forebay.kvstore.layout import Layout
from forebay.kvstore.lookup import STATES, Found, Lookup, Lost, MissReason
from forebay.kvstore.moves import Label, Move, Origin, Pages, Tier
from forebay.kvstore.pending import Arrival, Room
from forebay.kvstore.policy import worth
from forebay.kvstore.sharing import Sharing, copy_in
from forebay.kvstore.totals import EvictionCause, Totals

SPARE_SHARE = 64
"""Ranking all units takes milliseconds: an eviction frees this part of the tier beyond what was asked for."""


class Tiers:
    def __init__(self, layout: Layout, config: StoreConfig, fingerprint: str) -> None:
        self.layout = layout
        self.config = config
        self.device = TierIndex("device", layout, config.device_bytes // layout.page_bytes)
        # Numbers for all that the arena holds, and for what is on its way there while its place is still held: the
        # device's pages, and what is written into them at once.
        host_bytes = config.host_bytes + 2 * config.device_bytes if config.host_bytes else 0
        self.host = TierIndex("host", layout, host_bytes // layout.page_bytes)
        self.ssd = TierIndex("ssd", layout, config.ssd_bytes // layout.page_bytes)
        self.pool = TierIndex("pool", layout, config.pool_known_pages if config.pool is not None else 0)
        self.order = (self.device, self.host, self.ssd, self.pool)
        self.lost = Lost(config.remembered_keys)
        self.lookup = Lookup(layout, self.order, self.lost, fingerprint)
        self.history = History(config.remembered_uses)
        self.limits = ClassLimits(config.classes, layout.page_bytes)
        self.tick = 0
        self.totals = Totals()
        self.gone_for_good = GoneForGood()
        self.sharing = Sharing(self.order)
        self._ssd_is_on = config.ssd_path is not None
        self._by_name = {tier.tier: tier for tier in self.order}
        self._row_bytes = {group.name: group.row_bytes for group in layout.paged}

    def of(self, tier: Tier) -> TierIndex:
        return self._by_name[tier]

    def run_bytes(self, group: str, blocks: int) -> int:
        """Bytes of so many blocks of one layer."""
        return blocks * self.layout.block_tokens * self._row_bytes[group]

    def make_room(self, n_pages: int, below: float = float("inf")) -> Room | None:
        """Evict from the device, least worth first, until `n_pages` are free, and a few more if it must at all.

        None, and nothing changed, where even all that nobody pins and that is worth less than `below` were too little.
        """
        missing = n_pages - self.device.pool.free
        if missing <= 0:
            return Room(moves=[], arrivals=[])
        if missing > self.device.pool.cached:
            return None
        valuation = self.valuation()
        victims = least(valuation.ranked(self.device), missing, self.device.pool.total // SPARE_SHARE, below)
        room = Room(moves=[], arrivals=[])
        if victims is not None:
            self._demote(victims, room, "dropped")
        return None if victims is None else room

    def make_class_room(self, class_name: str, n_pages: int, below: float = float("inf")) -> Room:
        """Evict from the device what is cached of a class, least worth first, as far as `n_pages` more of it exceed its
        quota. What live requests use stays, and is cut by `keep_quotas` when they end."""
        room = Room(moves=[], arrivals=[])
        excess = self.limits.excess(self.device, class_name, n_pages)
        excess = min(excess, self.device.cached_pages[class_name])
        if excess > 0:
            self._demote(self._of_class(class_name, excess, below), room, "quota")
        return room

    def keep_quotas(self) -> None:
        """Pins were given back: what is cached of a class on the device beyond its quota goes, least worth first."""
        for class_name, excess in self.limits.cached_excess(self.device).items():
            for _, unit in self._of_class(class_name, excess):
                self.drop(self.device, unit, "evicted", "saved" if self.is_below(self.device, unit) else "quota")

    def _of_class(self, class_name: str, n_pages: int, below: float = float("inf")) -> list[tuple[float, Unit]]:
        """The least of what is cached of a class on the device, until they hold so many pages and a few more; all that
        is worth less than `below` where that is too little."""
        ranked = self.valuation().ranked(self.device)
        own = [(value, unit) for value, unit in ranked if unit.origin.class_name == class_name and value < below]
        return least(own, n_pages, self.limits.pages("device")[class_name] // SPARE_SHARE, below) or own

    def advance(self, now: float) -> bool:
        """Time has come to `now`: what nobody used for as long as its class keeps things goes. False where none can."""
        self.limits.advance(now)
        for tier, unit in self.limits.expired():
            self._end(tier, unit, "expired")
        return self.limits.has_ttl

    def write_through(self, units: Sequence[Span | Checkpoint]) -> Room:
        """Copy device units, just written, down too, where the policy is to; to the host also what will not stay on the
        device, since its class has no room there."""
        room = Room(moves=[], arrivals=[])
        if self.config.ssd_write == "write_through":
            for unit in units:
                self.save_to_ssd(unit, self.device, room)
        if self.config.pool_write == "write_through":
            for unit in units:
                self._save_to_pool(unit, self.device, room)
        for unit in units:
            over = self.limits.excess(self.device, unit.origin.class_name) > 0
            if (over or self.config.write == "write_through") and self._on_host(unit) is None:
                self._save(unit, self._just_used(unit), room)
        return room

    def save_used(self, pins: Iterable[tuple[TierIndex, Unit]]) -> Room:
        """Copy what requests come back to, and a new one now uses, further down, where the policy is to. What the pool
        is to have and lost (its master died, or it made room) goes there again."""
        room = Room(moves=[], arrivals=[])
        for tier, unit in pins:
            if tier not in (self.device, self.host) or not isinstance(unit, Span | Checkpoint) or not unit.entered:
                continue
            if self.config.ssd_write == "selective":
                self.save_used_to_ssd(unit, tier, room)
            if self.config.pool_write == "write_through" or unit.uses >= self.config.pool_uses:
                self._save_to_pool(unit, tier, room)
        return room

    def save_used_to_ssd(self, unit: Span | Checkpoint, tier: TierIndex, room: Room) -> bool:
        """As `save_to_ssd`, unless the policy is selective and it had too little use."""
        rare = self.config.ssd_write == "selective" and unit.uses < self.config.ssd_uses
        return not rare and self.save_to_ssd(unit, tier, room)

    def save_to_ssd(self, unit: Span | Checkpoint, tier: TierIndex, room: Room) -> bool:
        """Add the copy of a unit of `tier` to `room`. True where the SSD has it, or will."""
        return self._ssd_is_on and self._save_to_view(self.ssd, unit, tier, room)

    def _save_to_pool(self, unit: Span | Checkpoint, tier: TierIndex, room: Room) -> bool:
        lasting = unit.expires_at == inf
        return lasting and self.config.pool is not None and self._save_to_view(self.pool, unit, tier, room)

    def _save_to_view(self, view: TierIndex, unit: Span | Checkpoint, tier: TierIndex, room: Room) -> bool:
        if copy_in(view, unit) is not None:
            return True
        if not self._view_room(view, len(unit.pages), unit.origin.class_name):
            return False
        label = self._label(unit)
        copy = view.add(self._unit(view, label, len(unit.pages), tick=unit.tick, uses=unit.uses))
        copy.expires_at = unit.expires_at
        self.limits.watch(view, copy)
        room.moves.append(
            Move(
                source=tier.tier,
                source_pages=unit.pages,
                target=view.tier,
                target_pages=copy.pages,
                n_bytes=self._n_bytes(unit),
                label=label,
            )
        )
        room.arrivals.append(Arrival(tier=view, unit=copy, keys=keys_of(unit)))
        return True

    def adopt(self, name: Tier, label: Label, expires_at: float | None = None) -> Pages | None:
        """Enter a unit whose bytes lie in a lower tier already; its pages there, or None where it is not kept.

        `expires_at` None: it is as if stored now.
        """
        tier = self.of(name)
        if self._holds(tier, label):
            return None
        if label.group == STATES:
            n_pages = self.layout.state_pages
            if label.before is not None and self.lookup.checkpoint(label.before) is None:
                label = replace(label, before=None, start_tokens=0)
        else:
            n_pages = next(len(group.layers) for group in self.layout.paged if group.name == label.group)
        if not self._view_room(tier, n_pages, label.origin.class_name):
            return None
        unit = tier.add(self._unit(tier, label, n_pages, tick=self.tick))
        if expires_at is None:
            self.limits.date(tier, unit)
        else:
            unit.expires_at = expires_at
            self.limits.watch(tier, unit)
        entered = tier.enter(unit, list(label.keys))
        tier.unpin(unit)
        return unit.pages if entered else None

    def _holds(self, tier: TierIndex, label: Label) -> bool:
        last = label.keys[-1]
        return last in tier.checkpoints if label.group == STATES else tier.span(label.group, last) is not None

    def turn_off_ssd(self) -> None:
        self._ssd_is_on = False
        for unit in list(self.ssd.units):
            if unit.entered:
                self.drop(self.ssd, unit, "evicted", "failed")
            else:
                unit.lost = True

    def use(self, pins: Iterable[tuple[TierIndex, Unit]], origin: Origin, blocks: int) -> None:
        """A request starts: what it pins was used now, of spans the part in its first `blocks` blocks."""
        self.tick += 1
        for _, unit in pins:
            unit.tick = self.tick
            unit.uses += unit.entered
            self.limits.renew(unit, origin.class_name)
            if not isinstance(unit, Span) or unit.first_block + len(unit.keys) <= blocks:
                self.sharing.use(unit, origin)

    def purge(self, session: bytes | None, tenant: bytes | None) -> int:
        """End what is the session's alone, or the tenant's. Pages that a request uses go when it ends. How many."""
        owned = self.sharing.owned(session, tenant)
        for tier, unit in owned:
            self._end(tier, unit, "purged")
        return sum(len(unit.pages) for _, unit in owned)

    def _end(self, tier: TierIndex, unit: Unit, cause: EvictionCause) -> None:
        """Whether it matches already or is on its way."""
        if unit.entered:
            self.drop(tier, unit, "evicted", cause)
        else:
            unit.lost = True

    def own(self, unit: Unit, origin: Origin) -> None:
        """A request stores this device unit now: its bytes are there, or on their way."""
        self.device.charge(unit, origin)
        self.limits.date(self.device, unit)

    def new_checkpoint(
        self, key: bytes, tokens: int, previous: bytes | None, previous_tokens: int, origin: Origin
    ) -> Checkpoint:
        """On free device pages, with one pin; it matches only once entered."""
        pages = self.device.pool.take(self.layout.state_pages)
        kept = self.device.add(
            Checkpoint(
                pages=pages,
                tick=self.tick,
                key=key,
                tokens=tokens,
                previous=previous,
                previous_tokens=previous_tokens,
            )
        )
        self.own(kept, origin)
        return kept

    def fresh_worth(self, start: int, end: int, n_pages: int, density: float) -> float:
        """Of pages that save the prefill of tokens [start, end), and of which so many uses are expected."""
        return worth(self.config.cost.seconds(start, end), n_pages * self.layout.page_bytes, density)

    def drop(self, tier: TierIndex, unit: Unit, why: MissReason, cause: EvictionCause) -> None:
        """End a unit at once; remember the keys that are now nowhere."""
        keys = keys_of(unit)
        self.gone_for_good.note(tier.tier, cause, unit.pages)
        self.totals.evicted_pages[tier.tier, cause] += len(unit.pages)
        tier.forget(unit)
        if isinstance(unit, Span):
            for key in keys:
                if self.lookup.span(unit.group, key) is None:
                    self.lost.remember(unit.group, key, why)
        elif isinstance(unit, Checkpoint) and self.lookup.checkpoint(unit.key) is None:
            self.lost.remember(STATES, unit.key, why)
            self.history.forget_state(unit.key)
            self._close_gap(unit)

    def drop_checkpoint(self, key: bytes, why: MissReason, cause: EvictionCause) -> None:
        """All or none: a checkpoint that lost one group's part goes whole, in every tier."""
        for tier in self.order:
            if key in tier.checkpoints:
                self.drop(tier, tier.checkpoints[key], why, cause)

    def spill(self, label: Label, uses: int, expires_at: float) -> Pages | None:
        """Enter a unit that leaves the host on the SSD, where its bytes are about to go, if the policy is to."""
        rare = self.config.ssd_write == "selective" and uses < self.config.ssd_uses
        return None if rare or not self._ssd_is_on else self.adopt("ssd", label, expires_at)

    def is_below(self, tier: TierIndex, unit: Unit) -> bool:
        """Whether a tier below this one has it too."""
        return any(copy_in(lower, unit) is not None for lower in self.order[self.order.index(tier) + 1 :])

    def _demote(self, victims: list[tuple[float, Unit]], room: Room, unless_saved: EvictionCause) -> None:
        """What the host has already is renewed first, so that what is saved now does not take its place."""
        for value, unit in sorted(victims, key=lambda victim: self._on_host(victim[1]) is None):
            assert isinstance(unit, Span | Checkpoint), "a running state is always pinned"
            saved = self._save(unit, value, room)
            if not saved and value > 0:
                saved = self.save_used_to_ssd(unit, self.device, room)
            self.drop(self.device, unit, "evicted", "saved" if saved else unless_saved)

    def _on_host(self, unit: Unit) -> Span | Checkpoint | None:
        return copy_in(self.host, unit)

    def _view_room(self, tier: TierIndex, n_pages: int, class_name: str) -> bool:
        """Forget units of a tier whose pages are numbers only, the longest unused first, until `n_pages` are free, and
        the class that wants them keeps its quota."""
        excess, missing = self.limits.excess(tier, class_name, n_pages), n_pages - tier.pool.free
        if excess > tier.cached_pages[class_name] or missing > tier.pool.cached:
            return False
        if excess > 0:
            own = [unit for unit in tier.evictable() if unit.origin.class_name == class_name]
            self._forget_oldest(tier, own, excess, "quota")
        missing = n_pages - tier.pool.free
        if missing > 0:
            self._forget_oldest(tier, tier.evictable(), missing + tier.pool.total // SPARE_SHARE, "dropped")
        return True

    def _forget_oldest(self, tier: TierIndex, units: list[Unit], n_pages: int, cause: EvictionCause) -> None:
        for unit in sorted(units, key=lambda unit: (not self.history.is_over(unit), unit.tick)):
            if n_pages <= 0:
                break
            n_pages -= len(unit.pages)
            self.drop(tier, unit, "evicted", cause)

    def _save(self, unit: Span | Checkpoint, value: float, room: Room) -> bool:
        """Add the copy of a device unit to `room`; where the host has one already, as far as this worker knows, the
        move renews it. False where it is not worth it."""
        label, copy = self._label(unit), self._on_host(unit)
        if isinstance(copy, Span) and copy.keys[-1] != label.keys[-1]:
            return True  # a longer run is there
        if copy is None and (value <= 0 or not self._view_room(self.host, len(unit.pages), unit.origin.class_name)):
            return False
        if copy is None:
            copy = self.host.add(self._unit(self.host, label, len(unit.pages), tick=unit.tick, uses=unit.uses))
            copy.expires_at = unit.expires_at
        else:
            self.host.pin(copy)
        room.moves.append(
            Move(
                source="device",
                source_pages=unit.pages,
                target="host",
                target_pages=copy.pages,
                n_bytes=self._n_bytes(unit),
                label=label,
                worth=value,
                uses=unit.uses,
                expires_at=unit.expires_at,
            )
        )
        room.arrivals.append(Arrival(tier=self.host, unit=copy, keys=keys_of(unit)))
        return True

    def below(self, found: Found, most_bytes: int) -> list[tuple[TierIndex, Unit, Move]]:
        """Of the hit's units in slow tiers those that fit into `most_bytes` together, with the moves that bring them
        into the host, to pages numbered from 0 on: which of this worker's view they get is known once they are there.

        Their use is certain and near: one per unit of time, where others are hoped for. So what is there unused goes
        first, until it is known again, by age or with the next eviction from the device, what they are worth after it.
        """
        units: list[tuple[TierIndex, Unit, Move]] = []
        n_pages, slow = 0, found.slow_units()
        value = self.fresh_worth(0, found.hit.tokens, max(1, sum(len(unit.pages) for _, unit in slow)), 1.0)
        for name, unit in slow:
            n_bytes = self._n_bytes(unit)
            most_bytes -= len(unit.pages) * n_bytes
            if most_bytes < 0:
                break
            move = Move(
                source=name,
                source_pages=unit.pages,
                target="host",
                target_pages=np.arange(n_pages, n_pages + len(unit.pages), dtype=np.int32),
                n_bytes=n_bytes,
                label=self._label(unit),
                worth=value,
                uses=unit.uses,
                expires_at=unit.expires_at,
            )
            units.append((self.of(name), unit, move))
            n_pages += len(unit.pages)
        return units

    def _n_bytes(self, unit: Span | Checkpoint) -> int:
        """Of each of its pages."""
        return self.lookup.page_bytes(unit)

    def valuation(self) -> Valuation:
        """What everything is worth as the tiers stand now."""
        return Valuation(
            self.layout, self.order, self.config.cost, lambda units: self.history.densities(units, self.tick)
        )

    def _just_used(self, unit: Span | Checkpoint) -> float:
        """What a unit that was written just now is worth."""
        density = float(self.history.densities([unit], unit.tick)[0])
        return self.fresh_worth(*self._extent(unit), len(unit.pages), density)

    def _extent(self, unit: Span | Checkpoint) -> tuple[int, int]:
        """The tokens whose prefill it saves, from and to."""
        if isinstance(unit, Checkpoint):
            return unit.previous_tokens, unit.tokens
        block = self.layout.block_tokens
        return unit.first_block * block, (unit.first_block + len(unit.keys)) * block

    def _label(self, unit: Span | Checkpoint) -> Label:
        start, end = self._extent(unit)
        if isinstance(unit, Span):
            before, keys, group = unit.parent, tuple(unit.keys), unit.group
        else:
            before, keys, group = unit.previous, (unit.key,), STATES
        return Label(group=group, keys=keys, before=before, start_tokens=start, end_tokens=end, origin=unit.origin)

    def _unit(self, tier: TierIndex, label: Label, n_pages: int, *, tick: int = 0, uses: int = 1) -> Span | Checkpoint:
        """What the label says, on free pages of a tier, with one pin; it matches only once entered."""
        pages = tier.pool.take(n_pages)
        if label.group == STATES:
            return Checkpoint(
                pages=pages,
                tick=tick,
                uses=uses,
                origin=label.origin,
                key=label.keys[0],
                tokens=label.end_tokens,
                previous=label.before,
                previous_tokens=label.start_tokens,
            )
        return Span(
            pages=pages,
            tick=tick,
            uses=uses,
            origin=label.origin,
            group=label.group,
            first_block=label.start_tokens // self.layout.block_tokens,
            parent=label.before,
        )

    def _close_gap(self, lost: Checkpoint) -> None:
        """Those after a lost checkpoint now save the prefill from the one before it."""
        for tier in self.order:
            for checkpoint in tier.checkpoints.values():
                if checkpoint.previous == lost.key:
                    checkpoint.previous, checkpoint.previous_tokens = lost.previous, lost.previous_tokens

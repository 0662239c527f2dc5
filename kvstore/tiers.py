"""The tiers of one worker: device pages above host pages, the SSD and the pool, and the eviction that makes room.

Making room answers with values: the moves that save what is worth saving, and the saved units, which match only after
the moves were carried out.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from forebay.kvstore.config import StoreConfig
from forebay.kvstore.eviction import Valuation
from forebay.kvstore.history import History
from forebay.kvstore.index import Checkpoint, Span, TierIndex, Unit
from forebay.kvstore.layout import Layout
from forebay.kvstore.lookup import STATES, Lookup, Lost, MissReason
from forebay.kvstore.moves import Label, Move, Pages, Tier
from forebay.kvstore.pending import Arrival, Room
from forebay.kvstore.policy import worth
from forebay.kvstore.totals import EvictionCause, Totals

SPARE_SHARE = 64
"""Ranking all units takes milliseconds: an eviction frees this part of the tier beyond what was asked for."""


class Tiers:
    def __init__(self, layout: Layout, config: StoreConfig, fingerprint: str) -> None:
        self.layout = layout
        self.config = config
        self.device = TierIndex("device", layout, config.device_bytes // layout.page_bytes)
        self.host = TierIndex("host", layout, config.host_bytes // layout.page_bytes)
        self.ssd = TierIndex("ssd", layout, config.ssd_bytes // layout.page_bytes)
        self.pool = TierIndex("pool", layout, config.pool_known_pages if config.pool is not None else 0)
        self.order = (self.device, self.host, self.ssd, self.pool)
        self.lost = Lost(config.remembered_keys)
        self.lookup = Lookup(layout, self.order, self.lost, fingerprint)
        self.history = History(config.remembered_uses)
        self.tick = 0
        self.totals = Totals()
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
        victims = _least(valuation.ranked(self.device), missing, self.device.pool.total // SPARE_SHARE, below)
        return None if victims is None else self._demote(victims, valuation)

    def write_through(self, units: Sequence[Span | Checkpoint]) -> Room:
        """Copy device units, just written, down too, where the policy is to: to the host, if it has nothing better."""
        room = Room(moves=[], arrivals=[])
        if self.config.ssd_write == "write_through":
            for unit in units:
                self.save_to_ssd(unit, self.device, room)
        if self.config.pool_write == "write_through":
            for unit in units:
                self._save_to_pool(unit, self.device, room)
        if self.config.write == "write_through":
            victims = _HostVictims(self)
            for unit in units:
                if self._on_host(unit) is None:
                    self._save(unit, self._just_used(unit), room, victims)
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
        return self.config.pool is not None and self._save_to_view(self.pool, unit, tier, room)

    def _save_to_view(self, view: TierIndex, unit: Span | Checkpoint, tier: TierIndex, room: Room) -> bool:
        if _copy_in(view, unit) is not None:
            return True
        if not self._view_room(view, len(unit.pages)):
            return False
        label = self._label(unit)
        copy = view.add(self._unit(view, label, len(unit.pages), tick=unit.tick, uses=unit.uses))
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
        room.arrivals.append(Arrival(tier=view, unit=copy, keys=_keys(unit)))
        return True

    def adopt(self, name: Tier, label: Label) -> Pages | None:
        """Enter a unit whose bytes lie in a lower tier already; its pages there, or None where it is not kept."""
        tier = self.of(name)
        if label.group == STATES:
            n_pages = self.layout.state_pages
            if label.before is not None and self.lookup.checkpoint(label.before) is None:
                label = replace(label, before=None, start_tokens=0)
        else:
            n_pages = next(len(group.layers) for group in self.layout.paged if group.name == label.group)
        if not self._view_room(tier, n_pages):
            return None
        unit = tier.add(self._unit(tier, label, n_pages, tick=self.tick))
        entered = tier.enter(unit, list(label.keys))
        tier.unpin(unit)
        return unit.pages if entered else None

    def turn_off_ssd(self) -> None:
        self._ssd_is_on = False
        for unit in [unit for unit in self.ssd.units if unit.entered]:
            self.drop(self.ssd, unit, "evicted", "failed")

    def use(self, pins: Iterable[tuple[TierIndex, Unit]]) -> None:
        """A request starts: what it pins was used now."""
        self.tick += 1
        for _, unit in pins:
            unit.tick = self.tick
            unit.uses += unit.entered

    def new_checkpoint(self, key: bytes, tokens: int, previous: bytes | None, previous_tokens: int) -> Checkpoint:
        """On free device pages, with one pin; it matches only once entered."""
        pages = self.device.pool.take(self.layout.state_pages)
        return self.device.add(
            Checkpoint(
                pages=pages,
                tick=self.tick,
                key=key,
                tokens=tokens,
                previous=previous,
                previous_tokens=previous_tokens,
            )
        )

    def fresh_worth(self, start: int, end: int, n_pages: int, density: float) -> float:
        """Of pages that save the prefill of tokens [start, end), and of which so many uses are expected."""
        return worth(self.config.cost.seconds(start, end), n_pages * self.layout.page_bytes, density)

    def drop(self, tier: TierIndex, unit: Unit, why: MissReason, cause: EvictionCause) -> None:
        """End a unit at once; remember the keys that are now nowhere."""
        keys = _keys(unit)
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

    def _demote(self, victims: list[tuple[float, Unit]], valuation: Valuation) -> Room:
        relied = {copy for _, unit in victims if (copy := self._on_host(unit)) is not None}
        host_victims = _HostVictims(self, valuation, relied)
        room = Room(moves=[], arrivals=[])
        for value, unit in victims:
            assert isinstance(unit, Span | Checkpoint), "a running state is always pinned"
            saved = self._on_host(unit) is not None or self._save(unit, value, room, host_victims)
            if not saved and value > 0:
                saved = self.save_used_to_ssd(unit, self.device, room)
            self.drop(self.device, unit, "evicted", "saved" if saved else "dropped")
        return room

    def _on_host(self, unit: Unit) -> Unit | None:
        return _copy_in(self.host, unit)

    def _view_room(self, tier: TierIndex, n_pages: int) -> bool:
        """Forget units of a tier whose pages are numbers only, the longest unused first, until `n_pages` are free."""
        missing = n_pages - tier.pool.free
        if missing <= 0:
            return True
        if missing > tier.pool.cached:
            return False
        missing += tier.pool.total // SPARE_SHARE
        for unit in sorted(tier.evictable(), key=lambda unit: unit.tick):
            if missing <= 0:
                break
            missing -= len(unit.pages)
            self.drop(tier, unit, "evicted", "dropped")
        return True

    def _save(self, unit: Span | Checkpoint, value: float, room: Room, victims: "_HostVictims") -> bool:
        """Add the copy of a device unit to `room`. False where the host holds only what is worth as much."""
        if value <= 0 or not victims.make_room(len(unit.pages), value, room):
            return False
        label = self._label(unit)
        copy = self.host.add(self._unit(self.host, label, len(unit.pages), tick=unit.tick, uses=unit.uses))
        room.moves.append(
            Move(
                source="device",
                source_pages=unit.pages,
                target="host",
                target_pages=copy.pages,
                n_bytes=self._n_bytes(unit),
                label=label,
            )
        )
        room.arrivals.append(Arrival(tier=self.host, unit=copy, keys=_keys(unit)))
        return True

    def _n_bytes(self, unit: Span | Checkpoint) -> int:
        """Of each of its pages."""
        return self.run_bytes(unit.group, len(unit.keys)) if isinstance(unit, Span) else self.layout.state_bytes

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
        return Label(group=group, keys=keys, before=before, start_tokens=start, end_tokens=end)

    def _unit(self, tier: TierIndex, label: Label, n_pages: int, *, tick: int = 0, uses: int = 1) -> Span | Checkpoint:
        """What the label says, on free pages of a tier, with one pin; it matches only once entered."""
        pages = tier.pool.take(n_pages)
        if label.group == STATES:
            return Checkpoint(
                pages=pages,
                tick=tick,
                uses=uses,
                key=label.keys[0],
                tokens=label.end_tokens,
                previous=label.before,
                previous_tokens=label.start_tokens,
            )
        first_block = label.start_tokens // self.layout.block_tokens
        return Span(pages=pages, tick=tick, uses=uses, group=label.group, first_block=first_block, parent=label.before)

    def _close_gap(self, lost: Checkpoint) -> None:
        """Those after a lost checkpoint now save the prefill from the one before it."""
        for tier in self.order:
            for checkpoint in tier.checkpoints.values():
                if checkpoint.previous == lost.key:
                    checkpoint.previous, checkpoint.previous_tokens = lost.previous, lost.previous_tokens


class _HostVictims:
    """What the host would give up during one eviction, ranked once, when it is first asked.

    `relied`: host copies that spare a save of what leaves the device now; they are worth something from now on.
    """

    def __init__(self, tiers: Tiers, valuation: Valuation | None = None, relied: Collection[Unit] = ()) -> None:
        self._tiers = tiers
        self._valuation = valuation
        self._relied = relied
        self._ranking: list[tuple[float, Unit]] | None = None

    def make_room(self, n_pages: int, below: float, room: Room) -> bool:
        """Drop host units worth less than `below` until `n_pages` are free; all or nothing. Those that are worth
        something go to the SSD."""
        host = self._tiers.host
        missing = n_pages - host.pool.free
        if missing <= 0:
            return True
        if missing > host.pool.cached:
            return False
        ranking = self._ranked()
        victims = _least(ranking, missing, host.pool.total // SPARE_SHARE, below)
        if victims is None:
            return False
        for value, unit in victims:
            assert isinstance(unit, Span | Checkpoint), "no request runs in the host tier"
            saved = value > 0 and self._tiers.save_used_to_ssd(unit, host, room)
            self._tiers.drop(host, unit, "evicted", "saved" if saved else "dropped")
        del ranking[: len(victims)]
        return True

    def _ranked(self) -> list[tuple[float, Unit]]:
        if self._ranking is None:
            valuation = self._valuation or self._tiers.valuation()
            ranked = valuation.ranked(self._tiers.host)
            self._ranking = [pair for pair in ranked if pair[1] not in self._relied]
        return self._ranking


def _copy_in(tier: TierIndex, unit: Unit) -> Unit | None:
    """What holds there all that this unit holds."""
    if isinstance(unit, Checkpoint):
        return tier.checkpoints.get(unit.key)
    assert isinstance(unit, Span)
    return tier.span(unit.group, unit.keys[-1])


def _keys(unit: Unit) -> list[bytes]:
    return list(unit.keys) if isinstance(unit, Span) else []


def _least(
    ranked: list[tuple[float, Unit]], n_pages: int, spare_pages: int, below: float
) -> list[tuple[float, Unit]] | None:
    """The first of `ranked` that hold `n_pages`, and up to `spare_pages` beyond, all worth less than `below`.

    None where they hold fewer than `n_pages` together.
    """
    chosen: list[tuple[float, Unit]] = []
    for value, unit in ranked:
        if n_pages + spare_pages <= 0 or value >= below:
            break
        chosen.append((value, unit))
        n_pages -= len(unit.pages)
    return chosen if n_pages <= 0 else None

"""A lease: the pages of one request, from its hit to its close.

    blocks     0 ........ hit/page .......... hit ............ capacity
    device     [ shared, pinned )[ own: copied )[ own: to be written )

Whole pages of the hit are shared with whoever else reads them. The page in which the hit ends is copied: nobody writes
into a page that another request may read. A hit in the host tier arrives in new device pages.

Every call that changes pages adds to `moves`. The caller carries them out in order, then calls `ready`; before that
nothing they write can match (law 2), and no other call that changes pages is allowed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol

import numpy as np

from forebay.kvstore.chain import Chain
from forebay.kvstore.index import Checkpoint, Span, TierIndex, Unit
from forebay.kvstore.layout import PagedGroup
from forebay.kvstore.lookup import Found, Hit
from forebay.kvstore.moves import Move, Pages, Tier, joined
from forebay.kvstore.policy import checkpoints_for, worth
from forebay.kvstore.tiers import Arrival, Room, Tiers


class Holder(Protocol):
    """Who owns leases: a name, and an epoch that grows when its owner starts anew."""

    @property
    def name(self) -> str: ...
    @property
    def epoch(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """No pages, and nothing changed. `full`: try again when a lease closes. `too_large`: never fits this pool."""

    kind: Literal["full", "too_large"]
    needed_pages: int
    available_pages: int


class Lease:
    """Made by `Store.open`. A context manager; `close` is idempotent and every other call asks for an open lease.

    pages        group name -> int32 [layers of the group, spans]; for a state group [layers, 1], the running state
    moves        what to carry out before anything else touches the pages
    checkpoints  positions after the hit at which the policy wants `checkpoint` called
    """

    def __init__(self, tiers: Tiers, holder: Holder, chain: Chain | None, hit: Hit, on_close: "OnClose") -> None:
        self.holder = holder
        self.hit = hit
        self.pages: dict[str, Pages] = {}
        self.moves: list[Move] = []
        self.checkpoints: tuple[int, ...] = ()
        self.capacity_tokens = 0
        self.closed = False
        self._tiers = tiers
        self._keys = chain.keys if chain is not None else ()
        self._on_close = on_close
        self._spans: dict[str, list[Span]] = {group.name: [] for group in tiers.layout.paged}
        self._uncounted_prompt = 0
        self._committed_blocks = hit.tokens // tiers.layout.block_tokens
        self._pinned: list[tuple[TierIndex, Unit]] = []
        self._passing: list[tuple[TierIndex, Unit]] = []
        self._arrivals: list[Arrival] = []

    @property
    def hit_tokens(self) -> int:
        return self.hit.tokens

    @property
    def pins(self) -> list[tuple[TierIndex, Unit]]:
        """Every pin it holds, once each: the ones until `close`, then the ones until `ready`."""
        return self._pinned + self._passing

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ready(self) -> None:
        """All moves were carried out: what they wrote may match, what they read may go."""
        assert not self.closed
        if self._uncounted_prompt:
            self._tiers.totals.count(self._uncounted_prompt, self.hit, self.moves)
            self._uncounted_prompt = 0
        for arrival in self._arrivals:
            if isinstance(arrival.unit, Span):
                arrival.tier.enter_span(arrival.unit, arrival.keys)
            else:
                arrival.tier.enter_checkpoint(arrival.unit)
        self._arrivals = []
        self.moves = []
        self._let_pass()

    def commit(self, upto_tokens: int) -> None:
        """The rows of all tokens below `upto_tokens` are in the pages: their whole blocks become matchable.

        Blocks that another request committed meanwhile stay private here, and go back at `close`.
        """
        assert not self.closed
        assert not self.moves, "bytes that are still to be moved do not match"
        assert upto_tokens <= self.capacity_tokens
        blocks = min(upto_tokens // self._tiers.layout.block_tokens, len(self._keys))
        if blocks > self._committed_blocks:
            for group in self._tiers.layout.paged:
                self._commit_group(group, blocks)
            self._committed_blocks = blocks

    def checkpoint(self, at_tokens: int) -> Refusal | None:
        """Keep the running state, which stands at `at_tokens`, the end of a block of the prompt.

        Adds the moves that copy it; no moves where it is kept already. It takes the place of less valuable pages only.
        """
        assert not self.closed
        assert not self.moves
        blocks, rest = divmod(at_tokens, self._tiers.layout.block_tokens)
        assert rest == 0
        assert 0 < blocks <= len(self._keys), "a checkpoint lies at the end of a block of the prompt"
        known = self._tiers.lookup.checkpoint(self._keys[blocks - 1])
        if known is not None:
            known[1].tick = self._tiers.tick
            return None
        return self._keep_state(blocks)

    def grow(self, capacity_tokens: int) -> Refusal | None:
        """Pages for `capacity_tokens` tokens in all. `pages` is replaced."""
        assert not self.closed
        assert not self.moves
        layout = self._tiers.layout
        needed = layout.pages_for(capacity_tokens) - layout.pages_for(self.capacity_tokens)
        if needed > 0:
            room = self._tiers.make_room(needed)
            if room is None:
                return self.refusal(capacity_tokens, needed)
            self._take(room)
            for group in layout.paged:
                self._add_own_spans(group, capacity_tokens)
            self._table()
        self.capacity_tokens = max(capacity_tokens, self.capacity_tokens)
        return None

    def close(self) -> None:
        """Give everything back; moves not carried out must never be. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._arrivals = []
        self.moves = []
        self._let_pass()
        for tier, unit in self._pinned:
            tier.unpin(unit)
        self._pinned = []
        self._on_close(self)

    def start(self, found: Found, *, n_prompt: int, capacity_tokens: int) -> Refusal | None:
        """Pin the hit, then make room, then lay out all pages. On a refusal everything is as before."""
        self._pin_hit(found)
        layout, device = self._tiers.layout, self._tiers.device
        shared = sum(len(unit.pages) for tier, unit in self._pinned if tier is device)
        needed = layout.pages_for(capacity_tokens) + layout.state_pages - shared
        room = self._tiers.make_room(needed)
        if room is None:
            return self.refusal(capacity_tokens, needed)
        self._use()
        self._take(room)
        for group in layout.paged:
            self._lay_out(group, found.spans[group.name], capacity_tokens)
        self._start_state(found)
        self._table()
        self.moves = joined(self.moves)
        self.capacity_tokens = capacity_tokens
        self.checkpoints = self._wanted(n_prompt)
        self._uncounted_prompt = n_prompt if self._keys else 0
        return None

    def refusal(self, capacity_tokens: int, needed_pages: int) -> Refusal:
        layout, pool = self._tiers.layout, self._tiers.device.pool
        fits = layout.pages_for(capacity_tokens) + layout.state_pages <= pool.total
        return Refusal(
            kind="full" if fits else "too_large", needed_pages=needed_pages, available_pages=pool.free + pool.cached
        )

    def _pin_hit(self, found: Found) -> None:
        """Law 1. Whole device pages stay pinned; what is only copied from is pinned until it was."""
        blocks = self._committed_blocks
        for group in self._tiers.layout.paged:
            whole = blocks // self._per_page(group)
            for page, (tier, span) in enumerate(found.spans[group.name]):
                self._pin(tier, span, stays=tier == "device" and page < whole)
        if found.checkpoint is not None:
            self._pin(*found.checkpoint, stays=False)

    def _pin(self, tier: Tier, unit: Unit, *, stays: bool) -> None:
        index = self._tiers.of(tier)
        index.pin(unit)
        (self._pinned if stays else self._passing).append((index, unit))

    def _use(self) -> None:
        """What the hit pins was used now."""
        self._tiers.tick += 1
        for _, unit in self.pins:
            unit.tick = self._tiers.tick

    def _lay_out(self, group: PagedGroup, hit: list[tuple[Tier, Span]], capacity_tokens: int) -> None:
        per_page = self._per_page(group)
        whole = self._committed_blocks // per_page
        self._spans[group.name] = [span for tier, span in hit[:whole]]
        arriving = [page for page, (tier, _) in enumerate(hit) if tier == "host" or page == whole]
        for page, own in zip(arriving, self._own_spans(group, arriving), strict=True):
            tier, span = hit[page]
            blocks = min(self._committed_blocks - page * per_page, per_page)
            self._bring(tier, span, own, blocks)
            self._spans[group.name][page : page + 1] = [own]
        self._add_own_spans(group, capacity_tokens)

    def _bring(self, tier: Tier, span: Span, own: Span, blocks: int) -> None:
        """Copy the first blocks of a hit's span into a new one. What came from below may match here from now on."""
        n_bytes = self._tiers.run_bytes(span.group, blocks)
        self.moves.append(
            Move(source=tier, source_pages=span.pages, target="device", target_pages=own.pages, n_bytes=n_bytes)
        )
        if tier != "device":
            self._arrivals.append(Arrival(tier=self._tiers.device, unit=own, keys=span.keys[:blocks]))

    def _start_state(self, found: Found) -> None:
        layout, device = self._tiers.layout, self._tiers.device
        if not layout.states:
            return
        state = device.add(Unit(pages=device.pool.take(layout.state_pages)))
        self._pinned.append((device, state))
        tier, pages = None, state.pages[:0]
        if found.checkpoint is not None:
            tier, pages = found.checkpoint[0], found.checkpoint[1].pages
        self.moves.append(
            Move(
                source=tier,
                source_pages=pages,
                target="device",
                target_pages=state.pages,
                n_bytes=layout.state_bytes,
            )
        )
        first = 0
        for group in layout.states:
            self.pages[group.name] = state.pages[first : first + len(group.layers)].reshape(-1, 1)
            first += len(group.layers)
        self._state = state

    def _own_spans(self, group: PagedGroup, at_pages: list[int]) -> list[Span]:
        """New spans on free pages, one for each page position."""
        device, per_page = self._tiers.device, self._per_page(group)
        rows = device.pool.take(len(at_pages) * len(group.layers)).reshape(-1, len(group.layers))
        spans = []
        for page, pages in zip(at_pages, rows, strict=True):
            first = page * per_page
            parent = self._keys[first - 1] if 0 < first <= len(self._keys) else None
            span = Span(pages=pages, tick=self._tiers.tick, group=group.name, first_block=first, parent=parent)
            spans.append(device.add(span))
        self._pinned += [(device, span) for span in spans]
        return spans

    def _add_own_spans(self, group: PagedGroup, capacity_tokens: int) -> None:
        have = self._spans[group.name]
        have += self._own_spans(group, list(range(len(have), -(-capacity_tokens // group.page_tokens))))

    def _table(self) -> None:
        for group in self._tiers.layout.paged:
            spans = self._spans[group.name]
            self.pages[group.name] = np.stack([span.pages for span in spans], axis=1)

    def _commit_group(self, group: PagedGroup, blocks: int) -> None:
        per_page = self._per_page(group)
        for page in range(self._committed_blocks // per_page, -(-blocks // per_page)):
            span = self._spans[group.name][page]
            first = page * per_page
            keys = list(self._keys[first : min(first + per_page, blocks)])
            span.tick = self._tiers.tick
            if self._tiers.device.enter_span(span, keys) and len(keys) == per_page:
                self._write_through(span)

    def _keep_state(self, blocks: int) -> Refusal | None:
        layout, device = self._tiers.layout, self._tiers.device
        previous = self._tiers.lookup.previous_checkpoint(self._keys[: blocks - 1]) * layout.block_tokens
        tokens = blocks * layout.block_tokens
        room = self._tiers.make_room(layout.state_pages, self._fresh_worth(previous, tokens, layout.state_pages))
        if room is None:
            return self.refusal(self.capacity_tokens, layout.state_pages)
        self._take(room)
        kept = device.add(
            Checkpoint(
                pages=device.pool.take(layout.state_pages),
                tick=self._tiers.tick,
                key=self._keys[blocks - 1],
                tokens=tokens,
                previous_tokens=previous,
            )
        )
        self._passing.append((device, kept))
        self._arrivals.append(Arrival(tier=device, unit=kept, keys=[]))
        self.moves.append(
            Move(
                source="device",
                source_pages=self._state.pages,
                target="device",
                target_pages=kept.pages,
                n_bytes=layout.state_bytes,
            )
        )
        self._write_through_checkpoint(kept, blocks)
        return None

    def _write_through_checkpoint(self, kept: Checkpoint, blocks: int) -> None:
        """The state, and the rows before it that lie in a page not yet full."""
        for group in self._tiers.layout.paged:
            span = self._spans[group.name][(blocks - 1) // self._per_page(group)]
            if span.entered and len(span.keys) < self._per_page(group):
                self._write_through(span)
        self._write_through(kept)

    def _write_through(self, unit: Span | Checkpoint) -> None:
        if self._tiers.config.write == "write_through":
            start, end, blocks = self._extent(unit)
            self._take(self._tiers.save(unit, blocks, self._fresh_worth(start, end, len(unit.pages))))

    def _extent(self, unit: Span | Checkpoint) -> tuple[int, int, int]:
        """What it saves, from which token to which, and its blocks."""
        if isinstance(unit, Checkpoint):
            return unit.previous_tokens, unit.tokens, 0
        block = self._tiers.layout.block_tokens
        return unit.first_block * block, (unit.first_block + len(unit.keys)) * block, len(unit.keys)

    def _fresh_worth(self, start: int, end: int, n_pages: int) -> float:
        return worth(self._tiers.config.cost.seconds(start, end), n_pages * self._tiers.layout.page_bytes, 0)

    def _take(self, room: Room) -> None:
        self.moves += room.moves
        self._arrivals += room.arrivals
        self._passing += [(arrival.tier, arrival.unit) for arrival in room.arrivals]

    def _let_pass(self) -> None:
        passing, self._passing = self._passing, []
        for tier, unit in passing:
            tier.unpin(unit)

    def _per_page(self, group: PagedGroup) -> int:
        return group.page_tokens // self._tiers.layout.block_tokens

    def _wanted(self, n_prompt: int) -> tuple[int, ...]:
        block = self._tiers.layout.block_tokens
        if not self._tiers.layout.states:
            return ()
        wanted = checkpoints_for(
            self._tiers.config.checkpoints,
            n_prompt=n_prompt,
            hit_tokens=self.hit.tokens,
            block_tokens=block,
            branches=[self.hit.run_tokens],
        )
        return tuple(at for at in wanted if at <= len(self._keys) * block)


OnClose = Callable[[Lease], None]

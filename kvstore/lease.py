"""A lease: the pages of one request, from its hit to its close.

    tokens     0 ........... whole pages of the hit ... hit ............... capacity
    device     [ shared: pinned, only read )[ own: copied )[ own: to be written )

Nobody writes into a page that another request may read: the page in which the hit ends is copied. A part of the hit
that lies in a lower tier is copied into own pages too, and can be shared from then on.

Every call that changes pages adds to `moves`. The caller carries them out in order, then calls `ready`; until then
nothing they write can match (law 2), and no other call that changes pages is allowed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol

from forebay.kvstore.chain import Chain
from forebay.kvstore.index import Span, TierIndex, Unit
from forebay.kvstore.layout import PagedGroup
from forebay.kvstore.leased_pages import LeasedPages
from forebay.kvstore.lookup import Found, Hit
from forebay.kvstore.moves import Move, Origin, Pages, Tier, mark_of
from forebay.kvstore.pending import Arrival, Pending
from forebay.kvstore.policy import checkpoints_for
from forebay.kvstore.tiers import Tiers
from forebay.kvstore.turn import Turn


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
    """Made by `Store.open`. A context manager; `close` is idempotent, and every other call asks for an open lease.

    `checkpoints`: positions after the hit at which the policy wants `checkpoint` called.
    """

    def __init__(
        self,
        tiers: Tiers,
        holder: Holder,
        chain: Chain | None,
        hit: Hit,
        on_close: "Callable[[Lease], None]",
        turn: Turn | None = None,
    ) -> None:
        self.holder = holder
        self.hit = hit
        self.checkpoints: tuple[int, ...] = ()
        self.capacity_tokens = 0
        self.closed = False
        self._tiers = tiers
        self._layout = tiers.layout
        self._keys = chain.keys if chain is not None else ()
        self._on_close = on_close
        self._turn = turn
        self._origin = _origin(chain, turn)
        self._leased = LeasedPages(tiers, self._keys)
        self._pending = Pending()
        self._committed_blocks = hit.tokens // tiers.layout.block_tokens
        self._uncounted_prompt = 0

    @property
    def hit_tokens(self) -> int:
        return self.hit.tokens

    @property
    def pages(self) -> dict[str, Pages]:
        """Group name -> int32 [layers of the group, spans]; for a state group [layers, 1], the running state."""
        return self._leased.tables

    @property
    def moves(self) -> list[Move]:
        """What to carry out before anything else touches the pages."""
        return self._pending.moves

    @property
    def pins(self) -> list[tuple[TierIndex, Unit]]:
        """Every pin it holds, once each."""
        return self._leased.pinned + self._pending.passing

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
            self._note_use()
            self._uncounted_prompt = 0
        self._pending.complete()
        self._tiers.keep_quotas()

    def commit(self, upto_tokens: int) -> None:
        """The rows of all tokens below `upto_tokens` are in the pages: their whole blocks become matchable.

        Blocks that another request committed meanwhile stay private here, and go back at `close`.
        """
        self._assert_settled()
        assert upto_tokens <= self.capacity_tokens
        blocks = min(upto_tokens // self._layout.block_tokens, len(self._keys))
        if blocks > self._committed_blocks:
            room = self._tiers.make_class_room(self._origin.class_name, self._pages_to_enter(blocks))
            full = [span for group in self._layout.paged for span in self._commit_group(group, blocks)]
            self._committed_blocks = blocks
            self._pending.take(room)
            self._pending.take(self._tiers.write_through(full))

    def checkpoint(self, at_tokens: int) -> Refusal | None:
        """Keep the running state, which stands at `at_tokens`, the end of a block of the prompt.

        Adds the moves that copy it; none where it is kept already, but for rows before it that a lower tier is to have
        and lacks. It takes the place of less valuable pages only.
        """
        self._assert_settled()
        blocks, rest = divmod(at_tokens, self._layout.block_tokens)
        assert rest == 0
        assert 0 < blocks <= len(self._keys), "a checkpoint lies at the end of a block of the prompt"
        known = self._tiers.lookup.checkpoint(self._keys[blocks - 1])
        if known is not None:
            known[1].tick = self._tiers.tick
            self._tiers.limits.renew(known[1], self._origin.class_name)
            self._tiers.sharing.use(known[1], self._origin)
            self._note_state(blocks)
            self._pending.take(self._tiers.write_through(self._partial_spans(blocks)))
            return None
        return self._keep_state(blocks)

    def grow(self, capacity_tokens: int) -> Refusal | None:
        """Pages for `capacity_tokens` tokens in all. `pages` changes."""
        self._assert_settled()
        needed = self._layout.pages_for(capacity_tokens) - self._layout.pages_for(self.capacity_tokens)
        if needed > 0:
            room = self._tiers.make_room(needed)
            if room is None:
                return self._refusal(capacity_tokens, needed)
            self._pending.take(room)
            for group in self._layout.paged:
                self._leased.cover(group, capacity_tokens)
            self._leased.tabulate()
        self.capacity_tokens = max(capacity_tokens, self.capacity_tokens)
        return None

    def close(self) -> None:
        """Give everything back. Moves not carried out must never be. Idempotent."""
        if not self.closed:
            self.closed = True
            self._pending.abandon()
            self._leased.release()
            self._on_close(self)
            self._tiers.keep_quotas()

    def start(self, found: Found, *, n_prompt: int, capacity_tokens: int) -> Refusal | None:
        """Pin the hit, then make room, then lay out all pages. For `Store.open`, which closes it on a refusal."""
        self._pin_hit(found)
        needed = self._layout.pages_for(capacity_tokens) + self._layout.state_pages - self._leased.shared_pages
        room = self._tiers.make_room(needed)
        if room is None:
            return self._refusal(capacity_tokens, needed)
        self._tiers.use(self.pins, self._origin, self._committed_blocks)
        self._pending.take(self._tiers.make_class_room(self._origin.class_name, _pages_to_bring(found)))
        self._pending.take(room)
        self._pending.take(self._tiers.save_used(self.pins))
        for group in self._layout.paged:
            self._lay_out(group, found.spans[group.name], capacity_tokens)
        self._leased.tabulate()
        if self._layout.states:
            self._start_state(found)
        self._pending.join()
        self.capacity_tokens = capacity_tokens
        self.checkpoints = self._wanted(n_prompt)
        self._uncounted_prompt = n_prompt if self._keys else 0
        return None

    def _pin_hit(self, found: Found) -> None:
        """Law 1. Whole device pages stay pinned; what is only copied from is pinned until it was."""
        for group in self._layout.paged:
            whole = self._committed_blocks // self._per_page(group)
            for page, (tier, span) in enumerate(found.spans[group.name]):
                index = self._tiers.of(tier)
                index.pin(span)
                if tier == "device" and page < whole:
                    self._leased.pinned.append((index, span))
                else:
                    self._pending.hold(index, span)
        if found.checkpoint is not None:
            tier, checkpoint = found.checkpoint
            self._tiers.of(tier).pin(checkpoint)
            self._pending.hold(self._tiers.of(tier), checkpoint)

    def _lay_out(self, group: PagedGroup, hit: list[tuple[Tier, Span]], capacity_tokens: int) -> None:
        per_page = self._per_page(group)
        whole = self._committed_blocks // per_page
        spans = self._leased.spans[group.name]
        spans += [span for _, span in hit]
        copied = [page for page, (tier, _) in enumerate(hit) if tier != "device" or page == whole]
        for page, own in zip(copied, self._leased.add_spans(group, copied), strict=True):
            tier, span = hit[page]
            self._bring(tier, span, own, min(self._committed_blocks - page * per_page, per_page))
            spans[page] = own
        self._leased.cover(group, capacity_tokens)

    def _bring(self, tier: Tier, span: Span, own: Span, blocks: int) -> None:
        """Copy the first blocks of a hit's span into a new one. What came from below may match there from then on."""
        n_bytes = self._tiers.run_bytes(span.group, blocks)
        own.uses = span.uses
        self._pending.move(
            Move(
                source=tier,
                source_pages=span.pages,
                target="device",
                target_pages=own.pages,
                n_bytes=n_bytes,
                expires_at=self._tiers.limits.until(self._origin.class_name),
            )
        )
        if tier != "device":
            self._tiers.own(own, self._origin)
            self._pending.expect(Arrival(tier=self._tiers.device, unit=own, keys=span.keys[:blocks]))

    def _start_state(self, found: Found) -> None:
        """The hit's checkpoint, or zeros."""
        pages = self._leased.add_state().pages
        source, source_pages = None, pages[:0]
        if found.checkpoint is not None:
            source, source_pages = found.checkpoint[0], found.checkpoint[1].pages
        self._pending.move(
            Move(
                source=source,
                source_pages=source_pages,
                target="device",
                target_pages=pages,
                n_bytes=self._layout.state_bytes,
                expires_at=self._tiers.limits.until(self._origin.class_name),
            )
        )

    def _commit_group(self, group: PagedGroup, blocks: int) -> list[Span]:
        """Enter the run of every page that holds new blocks. Returns the spans that became full and match."""
        per_page = self._per_page(group)
        full = []
        for page in range(self._committed_blocks // per_page, -(-blocks // per_page)):
            span = self._leased.spans[group.name][page]
            first = page * per_page
            keys = list(self._keys[first : min(first + per_page, blocks)])
            span.tick = self._tiers.tick
            known = self._tiers.device.span(group.name, keys[-1])
            if known is not None:
                self._tiers.limits.renew(known, self._origin.class_name)
                if known.keys[-1] == keys[-1]:
                    self._tiers.sharing.use(known, self._origin)
                continue
            if span.entered:
                self._tiers.limits.renew(span, self._origin.class_name)
            else:
                self._tiers.own(span, self._origin)
            if self._tiers.device.enter_span(span, keys) and len(keys) == per_page:
                full.append(span)
        return full

    def _pages_to_enter(self, blocks: int) -> int:
        """Of the spans that have blocks up to there, and none that match yet."""
        per_page = {group.name: self._per_page(group) for group in self._layout.paged}
        return sum(
            len(span.pages)
            for name, spans in self._leased.spans.items()
            for span in spans[self._committed_blocks // per_page[name] : -(-blocks // per_page[name])]
            if not span.entered
        )

    def _note_use(self) -> None:
        """The turn uses its prompt's blocks, and the checkpoint that was restored."""
        if self._turn is not None and not self._turn.again:
            self._tiers.history.use(self._turn, self._keys)
            if self.hit.tokens:
                self._note_state(self.hit.tokens // self._layout.block_tokens)

    def _note_state(self, blocks: int) -> None:
        if self._turn is not None and not self._turn.again and self._layout.states:
            self._tiers.history.use_state(self._turn, self._keys[blocks - 1], passed=self._is_passed(blocks))

    def _is_passed(self, blocks: int) -> bool:
        """Does this turn keep a checkpoint behind this one?"""
        return bool(self.checkpoints) and blocks * self._layout.block_tokens < self.checkpoints[-1]

    def _keep_state(self, blocks: int) -> Refusal | None:
        assert self._leased.state is not None, "a model without states has no checkpoints"
        before = self._tiers.lookup.last_checkpoint(self._keys[: blocks - 1])
        previous, previous_tokens = self._keys[before - 1] if before else None, before * self._layout.block_tokens
        tokens, n_pages = blocks * self._layout.block_tokens, self._layout.state_pages
        density = self._tiers.history.fresh(self._keys[blocks - 1], passed=self._is_passed(blocks))
        worth = self._tiers.fresh_worth(previous_tokens, tokens, n_pages, density)
        room = self._tiers.make_room(n_pages, worth)
        if room is None:
            return self._refusal(self.capacity_tokens, n_pages)
        self._pending.take(room)
        self._pending.take(self._tiers.make_class_room(self._origin.class_name, n_pages, worth))
        self._note_state(blocks)
        kept = self._tiers.new_checkpoint(self._keys[blocks - 1], tokens, previous, previous_tokens, self._origin)
        self._pending.hold(self._tiers.device, kept)
        self._pending.expect(Arrival(tier=self._tiers.device, unit=kept, keys=[]))
        source, n_bytes = self._leased.state.pages, self._layout.state_bytes
        self._pending.move(
            Move(source="device", source_pages=source, target="device", target_pages=kept.pages, n_bytes=n_bytes)
        )
        self._pending.take(self._tiers.write_through([*self._written_spans(blocks), kept]))
        return None

    def _written_spans(self, blocks: int) -> list[Span]:
        """Of the rows before a block's end, those that were not yet written through: where the class has more than its
        quota now, perhaps all."""
        if self._tiers.limits.excess(self._tiers.device, self._origin.class_name) <= 0:
            return self._partial_spans(blocks)
        own = [span for _, span in self._leased.pinned if isinstance(span, Span)]
        return [span for span in own if span.entered]

    def _partial_spans(self, blocks: int) -> list[Span]:
        """The rows before a block's end that lie in pages not yet full."""
        last = [self._leased.spans[group.name][(blocks - 1) // self._per_page(group)] for group in self._layout.paged]
        return [
            span
            for group, span in zip(self._layout.paged, last, strict=True)
            if span.entered and len(span.keys) < self._per_page(group)
        ]

    def _refusal(self, capacity_tokens: int, needed_pages: int) -> Refusal:
        pool = self._tiers.device.pool
        fits = self._layout.pages_for(capacity_tokens) + self._layout.state_pages <= pool.total
        available = pool.free + pool.cached
        return Refusal(kind="full" if fits else "too_large", needed_pages=needed_pages, available_pages=available)

    def _wanted(self, n_prompt: int) -> tuple[int, ...]:
        block = self._layout.block_tokens
        wanted = checkpoints_for(
            self._tiers.config.checkpoints,
            n_prompt=n_prompt,
            hit_tokens=self.hit.tokens,
            block_tokens=block,
            branches=[self.hit.run_tokens],
        )
        return tuple(at for at in wanted if at <= len(self._keys) * block) if self._layout.states else ()

    def _per_page(self, group: PagedGroup) -> int:
        return group.page_tokens // self._layout.block_tokens

    def _assert_settled(self) -> None:
        assert not self.closed
        assert not self.moves, "carry out the moves and call ready first"


def _origin(chain: Chain | None, turn: Turn | None) -> Origin:
    tenant = b"" if chain is None else chain.tenant
    if turn is None:
        return Origin(tenant=tenant)
    session = mark_of(turn.session) if turn.session else b""
    return Origin(class_name=turn.class_name, session=session, tenant=tenant)


def _pages_to_bring(found: Found) -> int:
    """Device pages that will match once the rows of a hit came up into them."""
    return sum(len(span.pages) for spans in found.spans.values() for tier, span in spans if tier != "device")

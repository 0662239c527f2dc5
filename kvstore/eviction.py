"""What each unit of a tier is worth, so that the least goes first.

A unit is worth the seconds of prefill it saves, per byte it holds (policy.worth):

    checkpoint   the prefill from the checkpoint before it on its chain up to it
    span         the prefill from the last checkpoint before it up to the furthest one that needs it

So a chain under pressure first loses the checkpoints that lie close behind others, then its end, then all.

Nothing is saved by what cannot be restored: a span that no checkpoint needs, a checkpoint whose rows are not all
there, or a copy below the device of what the device holds too.
"""

from collections.abc import Sequence

from forebay.kvstore.index import Checkpoint, Span, TierIndex, Unit
from forebay.kvstore.layout import Layout
from forebay.kvstore.policy import PrefillCost, recency, worth


class Valuation:
    """The worth of units as the tiers stand now. Made for one eviction, then dropped."""

    def __init__(self, layout: Layout, tiers: Sequence[TierIndex], cost: PrefillCost, tick: int) -> None:
        self._layout = layout
        self._tiers = tiers
        self._cost = cost
        self._tick = tick
        self._rooted: dict[tuple[str, bytes], bool] = {}
        self._saves: dict[Unit, tuple[int, int]] = {}
        self._usable: set[bytes] = set()
        self._walk()

    def ranked(self, tier: TierIndex) -> list[tuple[float, Unit]]:
        """(worth, unit) of all that may be evicted, least first; among equals the longest unused."""
        valued = [(self.of(unit, tier), unit) for unit in tier.evictable()]
        valued.sort(key=lambda pair: (pair[0], pair[1].tick, _place(pair[1])))
        return valued

    def of(self, unit: Unit, tier: TierIndex) -> float:
        if tier is not self._tiers[0] and self._held_above(unit):
            return 0.0
        return worth(self._saved_s(unit), len(unit.pages) * self._layout.page_bytes, recency(self._tick - unit.tick))

    def _saved_s(self, unit: Unit) -> float:
        if isinstance(unit, Checkpoint):
            return self._cost.seconds(unit.previous_tokens, unit.tokens) if unit.key in self._usable else 0.0
        assert isinstance(unit, Span)
        return self._cost.seconds(*self._saves.get(unit, (0, 0)))

    def _held_above(self, unit: Unit) -> bool:
        device = self._tiers[0]
        if isinstance(unit, Checkpoint):
            return unit.key in device.checkpoints
        assert isinstance(unit, Span)
        return device.span(unit.group, unit.keys[-1]) is not None

    def _walk(self) -> None:
        """From every checkpoint, the furthest first, up its chain: the first to reach a span is the furthest."""
        held = {key: checkpoint for tier in self._tiers for key, checkpoint in tier.checkpoints.items()}
        for key, checkpoint in sorted(held.items(), key=lambda item: -item[1].tokens):
            if all(self._is_rooted(group.name, key) for group in self._layout.paged):
                self._usable.add(key)
                for group in self._layout.paged:
                    self._mark(group.name, checkpoint, held)

    def _is_rooted(self, group: str, key: bytes) -> bool:
        """Whether all rows from the prompt's first token up to this block are in some tier."""
        path: list[bytes] = []
        at: bytes | None = key
        rooted = True
        while at is not None and (group, at) not in self._rooted:
            path.append(at)
            spans = self._spans(group, at)
            if not spans:
                rooted = False
                break
            at = spans[0].parent
        else:
            rooted = at is None or self._rooted[group, at]
        self._rooted.update(((group, seen), rooted) for seen in path)
        return rooted

    def _mark(self, group: str, checkpoint: Checkpoint, held: dict[bytes, Checkpoint]) -> None:
        """Note what every span up this checkpoint's chain saves, unless a further one did."""
        floor: Checkpoint | None = checkpoint
        at: bytes | None = checkpoint.key
        while at is not None:
            spans = self._spans(group, at)
            if all(span in self._saves for span in spans):
                return
            start = spans[0].first_block * self._layout.block_tokens
            while floor is not None and floor.tokens > start:
                floor = held.get(floor.previous) if floor.previous is not None else None
            for span in spans:
                self._saves.setdefault(span, (floor.tokens if floor else 0, checkpoint.tokens))
            at = spans[0].parent

    def _spans(self, group: str, key: bytes) -> list[Span]:
        return [span for tier in self._tiers for span in tier.spans[group].get(key, ())]


def _place(unit: Unit) -> int:
    """Among equals, rows from a chain's end on, checkpoints from its start on: the furthest serves the next turn."""
    return -unit.first_block if isinstance(unit, Span) else 0

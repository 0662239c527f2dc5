"""What each unit of a tier is worth, so that the least goes first.

What can be given up together is weighed together, by the seconds of prefill it saves per byte it holds, times the uses
expected of it by holding on (policy.worth; history.py):

    checkpoint   the prefill from the checkpoint before it on its chain up to it, over the bytes of its states
    span         the same prefill, over the bytes of those states and of the rows between the two: the most of all
                 checkpoints behind it, since it is used whenever one of them is

So a chain under pressure first loses its end, and the checkpoints that its turns passed by, then all; and nothing
outlives its root.

Nothing is saved by what cannot be restored: a span that no checkpoint needs, a checkpoint whose rows are not all
there, or a copy below the device of what the device holds too.
"""

from collections.abc import Callable, Sequence

from forebay.kvstore.index import Checkpoint, Span, TierIndex, Unit
from forebay.kvstore.layout import Layout
from forebay.kvstore.policy import PrefillCost, worth
from forebay.kvstore.reuse import Floats


class Valuation:
    """The worth of units as the tiers stand now. Made for one eviction, then dropped."""

    def __init__(
        self,
        layout: Layout,
        tiers: Sequence[TierIndex],
        cost: PrefillCost,
        densities: Callable[[Sequence[Unit]], Floats],
    ) -> None:
        self._layout = layout
        self._tiers = tiers
        self._cost = cost
        self._densities = densities
        self._rooted: dict[tuple[str, bytes], bool] = {}
        self._worth: dict[Unit, float] = {}
        self._usable: set[bytes] = set()
        self._walk()

    def ranked(self, tier: TierIndex) -> list[tuple[float, Unit]]:
        """(worth, unit) of all that may be evicted, least first; among equals the longest unused."""
        units = tier.evictable()
        states = [unit for unit in units if isinstance(unit, Checkpoint) and unit.key in self._usable]
        self._worth.update(zip(states, self._state_worths(states), strict=True))
        below = tier is not self._tiers[0]
        valued = [(0.0 if below and self._held_above(unit) else self._worth.get(unit, 0.0), unit) for unit in units]
        valued.sort(key=lambda pair: (pair[0], pair[1].tick, _place(pair[1])))
        return valued

    def _held_above(self, unit: Unit) -> bool:
        device = self._tiers[0]
        if isinstance(unit, Checkpoint):
            return unit.key in device.checkpoints
        assert isinstance(unit, Span)
        return device.span(unit.group, unit.keys[-1]) is not None

    def _walk(self) -> None:
        """From every checkpoint that can be restored, the worthiest first, up its chain: what it reaches first is worth
        as much as it is."""
        held = {key: checkpoint for tier in self._tiers for key, checkpoint in tier.checkpoints.items()}
        groups = [group.name for group in self._layout.paged]
        usable = [each for each in held.values() if all(self._is_rooted(group, each.key) for group in groups)]
        self._usable = {each.key for each in usable}
        for value, checkpoint in sorted(zip(self._row_worths(usable), usable, strict=True), key=lambda pair: -pair[0]):
            for group in groups:
                self._mark(group, checkpoint.key, value)

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

    def _mark(self, group: str, key: bytes, value: float) -> None:
        """All rows up to this block are worth so much, unless something behind them is worth more."""
        at: bytes | None = key
        while at is not None:
            spans = self._spans(group, at)
            if all(span in self._worth for span in spans):
                return
            for span in spans:
                self._worth.setdefault(span, value)
            at = spans[0].parent

    def _row_worths(self, checkpoints: Sequence[Checkpoint]) -> list[float]:
        """Of the rows up to each checkpoint, as far as it needs them."""
        if not checkpoints or not self._layout.paged:
            return [0.0] * len(checkpoints)
        group = self._layout.paged[0].name
        densities = self._densities([self._spans(group, each.key)[0] for each in checkpoints]).tolist()
        return [
            worth(self._saved_s(each), self._held_bytes(each), density)
            for each, density in zip(checkpoints, densities, strict=True)
        ]

    def _state_worths(self, checkpoints: Sequence[Checkpoint]) -> list[float]:
        densities = self._densities(checkpoints).tolist() if checkpoints else []
        n_bytes = self._layout.state_pages * self._layout.page_bytes
        return [
            worth(self._saved_s(each), n_bytes, density) for each, density in zip(checkpoints, densities, strict=True)
        ]

    def _saved_s(self, checkpoint: Checkpoint) -> float:
        return self._cost.seconds(checkpoint.previous_tokens, checkpoint.tokens)

    def _held_bytes(self, checkpoint: Checkpoint) -> int:
        """Of its states, and of the rows from the checkpoint before it on."""
        tokens = checkpoint.tokens - checkpoint.previous_tokens
        pages = sum(len(group.layers) * tokens / group.page_tokens for group in self._layout.paged)
        return int((self._layout.state_pages + pages) * self._layout.page_bytes)

    def _spans(self, group: str, key: bytes) -> list[Span]:
        return [span for tier in self._tiers for span in tier.spans[group].get(key, ())]


def least(
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


def _place(unit: Unit) -> int:
    """Among equals, rows from a chain's end on, checkpoints from its start on: the furthest serves the next turn."""
    return -unit.first_block if isinstance(unit, Span) else 0

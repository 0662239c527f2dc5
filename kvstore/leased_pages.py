"""The pages that one lease has pinned, and the tables in which a model reads their numbers."""

import numpy as np

from forebay.kvstore.index import Span, TierIndex, Unit
from forebay.kvstore.layout import PagedGroup
from forebay.kvstore.moves import Pages
from forebay.kvstore.tiers import Tiers


class LeasedPages:
    """`spans`: group -> a span per page position. `state`: the running state's pages, all KDA layers in layout order.

    `tables`: group -> int32 [layers of the group, spans]; for a state group [layers, 1].
    """

    def __init__(self, tiers: Tiers, keys: tuple[bytes, ...]) -> None:
        self.tables: dict[str, Pages] = {}
        self.pinned: list[tuple[TierIndex, Unit]] = []
        self.spans: dict[str, list[Span]] = {group.name: [] for group in tiers.layout.paged}
        self.state: Unit | None = None
        self._tiers = tiers
        self._keys = keys

    @property
    def shared_pages(self) -> int:
        """Pages pinned so far; before any is taken, those of the hit that need not be taken."""
        return sum(len(unit.pages) for _, unit in self.pinned)

    def add_spans(self, group: PagedGroup, at_pages: list[int]) -> list[Span]:
        """New spans on free pages, one for each page position; nobody else ever writes there."""
        device, block_tokens = self._tiers.device, self._tiers.layout.block_tokens
        rows = device.pool.take(len(at_pages) * len(group.layers)).reshape(-1, len(group.layers))
        spans = []
        for page, pages in zip(at_pages, rows, strict=True):
            first = page * group.page_tokens // block_tokens
            parent = self._keys[first - 1] if 0 < first <= len(self._keys) else None
            span = Span(pages=pages, tick=self._tiers.tick, group=group.name, first_block=first, parent=parent)
            spans.append(device.add(span))
        self.pinned += [(device, span) for span in spans]
        return spans

    def cover(self, group: PagedGroup, capacity_tokens: int) -> None:
        """Add spans until the group has pages for so many tokens."""
        have = self.spans[group.name]
        have += self.add_spans(group, list(range(len(have), -(-capacity_tokens // group.page_tokens))))

    def add_state(self) -> Unit:
        """New pages for the running state."""
        layout, device = self._tiers.layout, self._tiers.device
        self.state = device.add(Unit(pages=device.pool.take(layout.state_pages)))
        self.pinned.append((device, self.state))
        first = 0
        for group in layout.states:
            self.tables[group.name] = self.state.pages[first : first + len(group.layers)].reshape(-1, 1)
            first += len(group.layers)
        return self.state

    def tabulate(self) -> None:
        """Make the tables of the paged groups anew."""
        for name, spans in self.spans.items():
            self.tables[name] = np.stack([span.pages for span in spans], axis=1)

    def release(self) -> None:
        pinned, self.pinned = self.pinned, []
        for tier, unit in pinned:
            tier.unpin(unit)

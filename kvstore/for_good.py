"""Pages whose bytes are to be erased, not only forgotten: what is left of them would be found again."""

import numpy as np

from forebay.kvstore.moves import Tier
from forebay.kvstore.totals import EvictionCause

CAUSES: dict[Tier, tuple[EvictionCause, ...]] = {
    "host": ("corrupt", "sibling_missing"),
    "ssd": ("quota", "expired"),
}
"""What goes for these causes is not to come back: from the host for another worker, or on its way to the SSD; from the
SSD after a restart."""


class GoneForGood:
    """Such pages by tier, until who holds their bytes takes them."""

    def __init__(self) -> None:
        self._pages: dict[Tier, list[int]] = {tier: [] for tier in CAUSES}

    def note(self, tier: Tier, cause: EvictionCause, pages: np.ndarray) -> None:
        if cause in CAUSES.get(tier, ()):
            self._pages[tier] += pages.tolist()

    def take(self, tier: Tier) -> list[int]:
        """Once each. Raises KeyError: a tier of which nothing is ever erased so."""
        pages, self._pages[tier] = self._pages[tier], []
        return pages

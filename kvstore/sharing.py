"""Whose a unit is over all tiers: of one session as long as that one alone has used all of it, then of nobody's."""

from collections.abc import Sequence
from dataclasses import replace

from forebay.kvstore.index import Checkpoint, Span, TierIndex, Unit
from forebay.kvstore.moves import Origin, Tier


class Sharing:
    def __init__(self, tiers: Sequence[TierIndex]) -> None:
        self._tiers = tiers
        self._shared: list[tuple[TierIndex, Unit]] = []

    def use(self, unit: Unit, origin: Origin) -> None:
        """A session used all of this unit: where that is another one than before, it is no session's alone any more,
        in no tier."""
        if unit.origin.session in (b"", origin.session):
            return
        last = unit.keys[-1] if isinstance(unit, Span) else None
        for tier in self._tiers:
            copy = copy_in(tier, unit)
            if copy is not None and (not isinstance(copy, Span) or copy.keys[-1] == last) and copy.origin.session:
                copy.origin = replace(copy.origin, session=b"")
                self._shared.append((tier, copy))

    def take(self, tier: Tier) -> list[int]:
        """Pages there that were one session's and are no more, since the last call."""
        shared = [unit for index, unit in self._shared if index.tier == tier and unit in index.units]
        self._shared = [(index, unit) for index, unit in self._shared if index.tier != tier]
        return [page for unit in shared for page in unit.pages.tolist()]

    def owned(self, session: bytes | None, tenant: bytes | None) -> list[tuple[TierIndex, Unit]]:
        """What is the session's alone, or the tenant's."""
        return [(tier, unit) for tier in self._tiers for unit in tier.units if unit.origin.belongs_to(session, tenant)]


def copy_in(tier: TierIndex, unit: Unit) -> Span | Checkpoint | None:
    """What holds there all that this unit holds."""
    if isinstance(unit, Checkpoint):
        return tier.checkpoints.get(unit.key)
    assert isinstance(unit, Span)
    return tier.span(unit.group, unit.keys[-1])

"""What the hit of a prompt that waits for its turn has in slow tiers: it stays there while it is copied into the host.

Nothing is promised: what the host has no room for, and what does not come, is restored at the prompt's turn.
"""

from collections.abc import Callable
from types import TracebackType

from forebay.kvstore.index import TierIndex, Unit
from forebay.kvstore.moves import Move


class Below:
    """Made by `Store.below`; pins its units until `close`, which is idempotent. A context manager.

    `moves`: one for each unit, into host pages numbered from 0 on.
    """

    def __init__(self, units: list[tuple[TierIndex, Unit, Move]], on_close: "Callable[[Below], None]") -> None:
        self.moves = [move for _, _, move in units]
        self.pins = [(tier, unit) for tier, unit, _ in units]
        self._on_close = on_close
        for tier, unit in self.pins:
            tier.pin(unit)

    def __enter__(self) -> "Below":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        pins, self.pins = self.pins, []
        for tier, unit in pins:
            tier.unpin(unit)
        self._on_close(self)

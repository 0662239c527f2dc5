"""What a lease waits for: moves to be carried out, and what may match or be let go once they were."""

from dataclasses import dataclass

from forebay.kvstore.index import Checkpoint, Span, TierIndex, Unit
from forebay.kvstore.moves import Move, joined


@dataclass(slots=True, kw_only=True, eq=False)
class Arrival:
    """A pinned unit that matches once its bytes are there. `keys`: a span's run, empty for a checkpoint."""

    tier: TierIndex
    unit: Span | Checkpoint
    keys: list[bytes]


@dataclass(slots=True, kw_only=True, eq=False)
class Room:
    """What eviction asks for: moves that save pages to a lower tier, in order, and the units that then lie there."""

    moves: list[Move]
    arrivals: list[Arrival]


class Pending:
    """Law 2 of one lease: nothing matches before `complete`. `passing` units are pinned until then."""

    def __init__(self) -> None:
        self.moves: list[Move] = []
        self.passing: list[tuple[TierIndex, Unit]] = []
        self._arrivals: list[Arrival] = []

    def hold(self, tier: TierIndex, unit: Unit) -> None:
        """Take over one pin of a unit that is only copied from, or that is on its way into a cache."""
        self.passing.append((tier, unit))

    def move(self, move: Move) -> None:
        self.moves.append(move)

    def expect(self, arrival: Arrival) -> None:
        """The unit matches from `complete` on. Its pin stays its owner's."""
        self._arrivals.append(arrival)

    def take(self, room: Room) -> None:
        """Saves come before whatever overwrites the pages saved: call this before adding moves to them."""
        self.moves += room.moves
        for arrival in room.arrivals:
            self.expect(arrival)
            self.hold(arrival.tier, arrival.unit)

    def join(self) -> None:
        self.moves = joined(self.moves)

    def complete(self) -> None:
        """Every move was carried out."""
        for arrival in self._arrivals:
            arrival.tier.enter(arrival.unit, arrival.keys)
        self.abandon()

    def abandon(self) -> None:
        """The moves never were nor will be carried out: what did not arrive never matches."""
        passing, self.passing, self._arrivals, self.moves = self.passing, [], [], []
        for tier, unit in passing:
            tier.unpin(unit)

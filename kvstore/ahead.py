"""A prompt's hit on its way up from slow tiers into the host, while the prompt waits for its turn.

What has come is published in the node's arena, as if another worker had stored it: the next look-up finds it there.
What has not come when the turn does is read then, straight into the device; that also says what is wrong with it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forebay.kvstore.below import Below
from forebay.kvstore.checksum import copy_checked
from forebay.kvstore.host import HostPool, Spill
from forebay.kvstore.moves import Move, Pages, Tier
from forebay.kvstore.opening import Restoring, Target
from forebay.kvstore.shared_entries import Place

Restore = Callable[[list[Move], Target], Sequence[Restoring]]
"""Start the reads of these moves."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Coming:
    """A unit's place in the arena, and the checksums of its pages that are there."""

    move: Move
    place: Place
    sums: dict[int, int]


class Ahead:
    """`total_bytes`: what it takes of the host. `advance` until it is True; `close`, at any time, is idempotent."""

    def __init__(
        self, host: HostPool, below: Below, restore: Restore, spill: Spill | None, count: Callable[[Tier, int], None]
    ) -> None:
        """`spill` takes what leaves the host for it; `count` hears what has come, by tier."""
        self._host, self._below, self._count = host, below, count
        self._coming: list[_Coming] = []
        self._at: dict[int, tuple[_Coming, int]] = {}
        for move in below.moves:
            if (place := host.claim(move, spill)) is not None:
                self._expect(_Coming(move=move, place=place, sums={}))
        self.total_bytes = _total_bytes(self._coming)
        self._restoring = restore([coming.move for coming in self._coming], self)

    @property
    def coming(self) -> bool:
        """Is something still to come?"""
        return bool(self._restoring)

    def scatter(self, pages: Pages, data: npt.NDArray[np.uint8]) -> None:
        """Rows of its units, by the numbers that their moves give them, into the arena."""
        for page, row in zip(pages.tolist(), data, strict=True):
            coming, number = self._at[page]
            granule = self._host.directory.table.granules[coming.place.granules[number], None, : len(row)]
            coming.sums[number] = copy_checked(granule, row[None])
            if len(coming.sums) == len(coming.move.target_pages):
                self._publish(coming)

    def advance(self) -> bool:
        """Take what was read. True once nothing more comes, and so it stays."""
        if self._still_coming():
            return False
        self.close()
        return True

    def wait(self, timeout_s: float) -> None:
        """Until `advance` has something to do, or the time is over."""
        if coming := self._still_coming():
            coming[0].wait(timeout_s)

    def close(self) -> None:
        """What has not come is given up, and what is still read is thrown away."""
        self._restoring = ()
        unfinished, self._coming = self._coming, []
        if unfinished:
            self.total_bytes -= _total_bytes(unfinished)
            self._host.directory.give_up([coming.place.entry for coming in unfinished])
        self._below.close()

    def _still_coming(self) -> list[Restoring]:
        """All go on."""
        return [each for each in self._restoring if not each.advance()]

    def _expect(self, coming: _Coming) -> None:
        self._coming.append(coming)
        self._at |= {page: (coming, number) for number, page in enumerate(coming.move.target_pages.tolist())}

    def _publish(self, coming: _Coming) -> None:
        self._coming.remove(coming)
        sums = [coming.sums[number] for number in range(len(coming.sums))]
        if self._host.directory.publish(coming.place, sums) is not None:
            source = coming.move.source
            assert source is not None
            self._count(source, len(sums) * coming.move.n_bytes)


def _total_bytes(units: Sequence[_Coming]) -> int:
    return sum(len(coming.move.source_pages) * coming.move.n_bytes for coming in units)

"""A prompt's hit on its way up from slow tiers into the host, while the prompt waits for its turn.

Bytes are copied by a thread beside the chunks of other prompts. What has come is published in the node's arena, as if
another worker had stored it: the next look-up finds it there. What has not come when the turn does is read then,
straight into the device; that also says what is wrong with it.
"""

import threading
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

WAIT_S = 0.1
"""How long the thread of a prompt that was let go may still wait for what nobody needs."""

Restore = Callable[[list[Move], Target], Sequence[Restoring]]
"""Start the reads of these moves."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Coming:
    """A unit's place in the arena, and the checksums of its pages that are there."""

    move: Move
    place: Place
    sums: dict[int, int]

    @property
    def is_there(self) -> bool:
        return len(self.sums) == len(self.move.target_pages)

    @property
    def total_bytes(self) -> int:
        return len(self.move.target_pages) * self.move.n_bytes


class Ahead:
    """`total_bytes`: what it takes of the host. `advance` until it is True; `close`, at any time, is idempotent.

    Its thread reads and copies, under `_lock`, and knows nothing else: all that others see is done by the caller's.
    """

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
        self.total_bytes = sum(coming.total_bytes for coming in self._coming)
        self._lock, self._closed, self._read = threading.Lock(), False, threading.Event()
        self._restoring = restore([coming.move for coming in self._coming], self)
        threading.Thread(target=self._run, name="prefetch", daemon=True).start()

    @property
    def coming(self) -> bool:
        """Is something still to come?"""
        return not self._closed

    def scatter(self, pages: Pages, data: npt.NDArray[np.uint8]) -> None:
        """Rows of its units, by the numbers that their moves give them, into the arena."""
        for page, row in zip(pages.tolist(), data, strict=True):
            coming, number = self._at[page]
            granule = self._host.directory.table.granules[coming.place.granules[number], None, : len(row)]
            coming.sums[number] = copy_checked(granule, row[None])

    def advance(self) -> bool:
        """Let others see what has come. True once nothing more comes, and so it stays."""
        if self._closed:
            return True
        if self._read.is_set():
            self.close()
        else:
            self._publish()
        return self._closed

    def wait(self, timeout_s: float) -> None:
        """Until all has come, or the time is over."""
        self._read.wait(timeout_s)

    def close(self) -> None:
        """What has not come is given up, and what is still read is thrown away."""
        if self._closed:
            return
        with self._lock:
            self._closed = True
        self._publish()
        if self._coming:
            self.total_bytes -= sum(coming.total_bytes for coming in self._coming)
            self._host.directory.give_up([coming.place.entry for coming in self._coming])
        self._below.close()

    def _run(self) -> None:
        """The thread."""
        try:
            while coming := self._still_coming():
                coming[0].wait(WAIT_S)
        finally:
            self._read.set()

    def _still_coming(self) -> list[Restoring]:
        """Take what was read; all go on. Nothing, once it is closed."""
        with self._lock:
            return [] if self._closed else [each for each in self._restoring if not each.advance()]

    def _expect(self, coming: _Coming) -> None:
        self._coming.append(coming)
        self._at |= {page: (coming, number) for number, page in enumerate(coming.move.target_pages.tolist())}

    def _publish(self) -> None:
        there = [coming for coming in self._coming if coming.is_there]
        self._coming = [coming for coming in self._coming if not coming.is_there]
        for coming in there:
            sums = [coming.sums[number] for number in range(len(coming.sums))]
            source = coming.move.source
            assert source is not None
            if self._host.directory.publish(coming.place, sums) is not None:
                self._count(source, coming.total_bytes)

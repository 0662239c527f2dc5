"""Objects read from the cluster-wide pool into registered memory, and verified there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic, sleep

import numpy as np
import numpy.typing as npt

from forebay.kvstore.config import StoreConfig
from forebay.kvstore.extents import ALIGN_BYTES
from forebay.kvstore.pool_client import Client, Trouble
from forebay.kvstore.pool_object import PoolObject
from forebay.kvstore.pool_room import Lent, Room
from forebay.kvstore.totals import PoolEvent

Bytes = npt.NDArray[np.uint8]
TRY_AGAIN_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fetched:
    """`rows` uint8 [rows, row_bytes], as long as this object lives. None: why there are none."""

    rows: Bytes | None
    trouble: PoolEvent | None = None
    lent: Lent | None = None


class Fetcher:
    """For one thread. `tell` hears what goes wrong."""

    def __init__(self, room: Room, config: StoreConfig, tell: Callable[[PoolEvent], None]) -> None:
        self._room = room
        self._read_s = config.pool_read_s
        # Another copy is read once the master knows that this one's holder died; where there is one copy, it is gone.
        self._again_s = 0.8 * config.pool_read_s if config.pool_copies > 1 else 0.0
        self._tell = tell

    def fetch(self, client: Client, units: Sequence[PoolObject]) -> list[Fetched]:
        """In order."""
        if not units:
            return []
        sizes = [unit.total_bytes for unit in units]
        starts = np.cumsum([0, *(-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in sizes)]).tolist()
        lent = self._room.take(starts[-1], self._read_s)
        if lent is None:
            self._tell("failed")
            return [Fetched(rows=None, trouble="failed") for _ in units]
        troubles = self._get(client, [unit.name for unit in units], [lent.address + at for at in starts[:-1]], sizes)
        return [
            self._verified(client, unit, lent, start, trouble)
            for unit, start, trouble in zip(units, starts, troubles, strict=False)
        ]

    def _get(self, client: Client, names: list[str], addresses: list[int], sizes: list[int]) -> list[Trouble | None]:
        until = monotonic() + self._again_s
        troubles = client.get(names, addresses, sizes)
        while (late := [n for n, trouble in enumerate(troubles) if trouble == "transfer"]) and monotonic() < until:
            sleep(TRY_AGAIN_S)
            again = client.get([names[n] for n in late], [addresses[n] for n in late], [sizes[n] for n in late])
            for n, trouble in zip(late, again, strict=True):
                troubles[n] = trouble
        return troubles

    def _verified(self, client: Client, unit: PoolObject, lent: Lent, start: int, trouble: Trouble | None) -> Fetched:
        image = lent.bytes[start : start + unit.total_bytes]
        if trouble is None and unit.is_whole(image):
            return Fetched(rows=unit.data_of(image), lent=lent)
        if trouble is None or trouble == "size":
            client.remove(unit.name)  # or it would stay in the way of the right one
            event: PoolEvent = "corrupt"
        elif trouble == "unreachable":
            event = "unreachable"
        else:
            event = "gone" if trouble in ("gone", "transfer") else "failed"
        self._tell(event)
        return Fetched(rows=None, trouble=event)

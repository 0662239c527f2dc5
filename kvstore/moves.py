"""Moves: what must happen to bytes so that the accounting becomes true. Values; `device.py` carries them out.

Moves are ordered: those that save pages to a lower tier stand before those that overwrite the pages saved.
"""

from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np
import numpy.typing as npt

Tier = Literal["device", "host"]
TIERS: tuple[Tier, ...] = ("device", "host")
Pages = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Move:
    """Copy the first `n_bytes` of each page of `source_pages` to the page of `target_pages` at the same place.

    `source` None writes zeros instead, and `source_pages` is empty. Both arrays are int32 [n].
    """

    source: Tier | None
    source_pages: Pages
    target: Tier
    target_pages: Pages
    n_bytes: int


def joined(moves: list[Move]) -> list[Move]:
    """The same moves, in the same order, with neighbours of one kind made one. Their pages must be disjoint."""
    return [
        Move(
            source=source,
            source_pages=np.concatenate([move.source_pages for move in run]),
            target=target,
            target_pages=np.concatenate([move.target_pages for move in run]),
            n_bytes=n_bytes,
        )
        for (source, target, n_bytes), group in groupby(moves, key=lambda m: (m.source, m.target, m.n_bytes))
        if (run := list(group))
    ]

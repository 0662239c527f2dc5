"""Moves: what must happen to bytes so that the accounting becomes true. Values; `device.py` carries them out.

Moves are ordered: those that save pages to a lower tier stand before those that overwrite the pages saved.
"""

from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from math import inf
from typing import Literal

import numpy as np
import numpy.typing as npt

Tier = Literal["device", "host", "ssd", "pool"]
TIERS: tuple[Tier, ...] = ("device", "host", "ssd", "pool")
SLOW: tuple[Tier, ...] = ("ssd", "pool")
"""Tiers that are read in the background."""

Pages = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Who stored a unit: `class_name` is charged with it. Empty where nobody known did.

    `session`, `tenant`: marks (`mark_of`) of the session that alone has used all of it, empty once another one did, and
    of the tenant's salt.
    """

    class_name: str = ""
    session: bytes = b""
    tenant: bytes = b""

    def belongs_to(self, session: bytes | None, tenant: bytes | None) -> bool:
        """To the session alone, or to the tenant: whichever mark is given."""
        return (session is not None and session == self.session) or (tenant is not None and tenant == self.tenant)


NOBODY = Origin()
MARK_BYTES = 16


def mark_of(name: str) -> bytes:
    """What stands for a session's key or a tenant's salt wherever units are told apart by them."""
    return blake2b(name.encode(errors="surrogatepass"), digest_size=MARK_BYTES).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """What a unit is, for a tier that others read too or that outlives the process.

    A span: its group, its run of block keys, the key of the block before the run, the run's tokens. A checkpoint: its
    one key, the key of the checkpoint before it, and the tokens of both. `origin` is as it was when the label was made.
    """

    group: str
    keys: tuple[bytes, ...]
    before: bytes | None
    start_tokens: int
    end_tokens: int
    origin: Origin = NOBODY


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Move:
    """Copy the first `n_bytes` of each page of `source_pages` to the page of `target_pages` at the same place.

    `source` None writes zeros instead, and `source_pages` is empty. Both arrays are int32 [n]. A move to a lower tier,
    or into the host from below, is of one unit, and has its `label`; `worth` (policy.worth) and `uses` are the unit's.
    `expires_at`: until when what is copied is kept where it arrives in a lower tier, or stays where it is read.
    """

    source: Tier | None
    source_pages: Pages
    target: Tier
    target_pages: Pages
    n_bytes: int
    label: Label | None = None
    worth: float = 0.0
    uses: int = 1
    expires_at: float = inf


def joined(moves: list[Move]) -> list[Move]:
    """The same moves, in the same order, with neighbours of one kind made one. Their pages must be disjoint."""
    return [
        Move(
            source=source,
            source_pages=np.concatenate([move.source_pages for move in run]),
            target=target,
            target_pages=np.concatenate([move.target_pages for move in run]),
            n_bytes=n_bytes,
            label=label,
            worth=run[0].worth,
            uses=run[0].uses,
            expires_at=run[0].expires_at,
        )
        for (source, target, n_bytes, label), group in groupby(moves, key=_kind)
        if (run := list(group))
    ]


def _kind(move: Move) -> tuple[Tier | None, Tier, int, Label | None]:
    return move.source, move.target, move.n_bytes, move.label

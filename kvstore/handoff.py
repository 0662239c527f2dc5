"""The handoff's contract (bodies follow in the next commits): what prefill gives decode, one transaction over all groups."""

from dataclasses import dataclass

from forebay.kvstore.arena import Arena
from forebay.kvstore.device import DevicePool
from forebay.kvstore.store import Holder, Lease, Refusal


class HandoffError(Exception):
    """A piece is missing, short or wrong. Nothing was adopted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One layer's rows of all tokens, or one layer's state: contiguous in the arena. `checksum` is xxh3_64."""

    group: str
    layer: int
    offset: int
    n_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """Picklable; names bytes, holds none."""

    id: str
    path: str
    fingerprint: str
    n_tokens: int
    pieces: tuple[Piece, ...]

    @property
    def n_bytes(self) -> int:
        return sum(piece.n_bytes for piece in self.pieces)


class HandoffArea:
    """The exporter's side, over one arena: handoffs until they are released or their holder is."""

    def __init__(self, arena: Arena, pool: DevicePool, fingerprint: str) -> None:
        raise NotImplementedError

    def export(self, lease: Lease, n_tokens: int) -> Handoff | Refusal:
        """Copy rows of the first `n_tokens` and the running state out of the lease, which may close afterwards."""
        raise NotImplementedError

    def release(self, handoff_id: str) -> None:
        """Idempotent."""
        raise NotImplementedError

    def release_holder(self, holder: Holder) -> int:
        raise NotImplementedError


def adopt(handoff: Handoff, pool: DevicePool, lease: Lease, fingerprint: str) -> None:
    """Read, verify everything, then copy into the lease's pages and running state. Raises HandoffError."""
    raise NotImplementedError

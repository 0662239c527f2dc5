"""The handoff: what prefill gives decode. One transaction over all groups, through an arena that both sides can open.

What travels is one layer's rows of all tokens, or one layer's state: a piece, contiguous, with its checksum. Page sizes
may differ between the two sides; rows, states and the fingerprint may not. The exporter's bytes stay until it is told
to release them, so an adopter that fails can be replaced by another.

How the pieces travel is a `Fetch`: `shared_memory` on one node, `handoff_engine.Engine.fetch` between nodes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from forebay.kvstore.arena import Arena, read
from forebay.kvstore.checksum import checksum
from forebay.kvstore.device import DevicePool
from forebay.kvstore.extents import ALIGN_BYTES
from forebay.kvstore.layout import Layout
from forebay.kvstore.lease import Holder, Lease
from forebay.kvstore.moves import Pages

Bytes = npt.NDArray[np.uint8]


class HandoffError(Exception):
    """A piece is missing, short or wrong, or is not of this model. Nothing was adopted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaRefusal:
    """No bytes, and nothing changed. `full`: try again when one is released. `too_large`: never fits this arena."""

    kind: Literal["full", "too_large"]
    needed_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One layer's rows of all tokens, or one layer's state. `offset` from the arena's start; `checksum` is xxh3_64."""

    group: str
    layer: int
    offset: int
    n_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Where another node finds the arena: the exporter's session with its Transfer Engine, and the arena's address."""

    session: str
    address: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """Names bytes, holds none: small, and may be pickled. `peer` None: for this node only."""

    id: str
    path: str
    peer: Peer | None = None
    fingerprint: str
    n_tokens: int
    pieces: tuple[Piece, ...]

    @property
    def n_bytes(self) -> int:
        return sum(piece.n_bytes for piece in self.pieces)

    @property
    def extent(self) -> tuple[int, int]:
        """The pieces lie one behind the other: start and length in the arena."""
        last = self.pieces[-1]
        return self.pieces[0].offset, last.offset + last.n_bytes - self.pieces[0].offset


Fetch = Callable[[Handoff], Sequence[Bytes]]
"""Brings the bytes of every piece into own memory, not verified; they stay until the next call. Raises HandoffError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Where one piece's bytes lie in a pool: the first `page_bytes` of each of `pages`, `n_bytes` in all."""

    group: str
    layer: int
    pages: Pages
    page_bytes: int
    n_bytes: int


class HandoffArea:
    """The exporter's side: handoffs lie in one arena until they are released, or their holder is."""

    def __init__(self, arena: Arena, pool: DevicePool, fingerprint: str, peer: Peer | None = None) -> None:
        self._arena = arena
        self._peer = peer
        self._pool = pool
        self._fingerprint = fingerprint
        self._kept: dict[str, tuple[int, Holder]] = {}
        self._exported = 0

    @property
    def free_bytes(self) -> int:
        return self._arena.extents.free_bytes

    @property
    def total_bytes(self) -> int:
        return self._arena.extents.total_bytes

    def __len__(self) -> int:
        return len(self._kept)

    def export(self, lease: Lease, n_tokens: int) -> Handoff | ArenaRefusal:
        """Copy the rows of the first `n_tokens` tokens and the running state. The lease may close afterwards."""
        parts = list(_parts(self._pool.layout, lease, n_tokens))
        offsets = np.cumsum([0] + [_aligned(part.n_bytes) for part in parts]).tolist()
        start = self._arena.extents.take(offsets[-1])
        if start is None:
            return self._refusal(offsets[-1])
        self._exported += 1
        handoff = Handoff(
            id=f"{self._arena.path}#{self._exported}",
            path=self._arena.path,
            peer=self._peer,
            fingerprint=self._fingerprint,
            n_tokens=n_tokens,
            pieces=tuple(self._write(part, start + offset) for part, offset in zip(parts, offsets, strict=False)),
        )
        self._kept[handoff.id] = (start, lease.holder)
        return handoff

    def release(self, handoff_id: str) -> None:
        """Its bytes may be overwritten from now on; who adopts it later gets a HandoffError. Idempotent."""
        kept = self._kept.pop(handoff_id, None)
        if kept is not None:
            self._arena.extents.give(kept[0])

    def release_holder(self, holder: Holder) -> int:
        """Release all of that name whose epoch is not newer. Returns how many."""
        owned = [
            handoff_id
            for handoff_id, (_, owner) in self._kept.items()
            if owner.name == holder.name and owner.epoch <= holder.epoch
        ]
        for handoff_id in owned:
            self.release(handoff_id)
        return len(owned)

    def _write(self, part: _Part, offset: int) -> Piece:
        data = self._arena.bytes[offset : offset + part.n_bytes]
        data[:] = self._pool.gather(part.pages, part.page_bytes).reshape(-1)[: part.n_bytes]
        return Piece(group=part.group, layer=part.layer, offset=offset, n_bytes=part.n_bytes, checksum=checksum(data))

    def _refusal(self, needed: int) -> ArenaRefusal:
        extents = self._arena.extents
        kind: Literal["full", "too_large"] = "too_large" if needed > extents.total_bytes else "full"
        return ArenaRefusal(kind=kind, needed_bytes=needed, available_bytes=extents.largest_bytes)


def shared_memory(handoff: Handoff) -> list[Bytes]:
    """Through the arena's file, on the exporter's node."""
    arrived = []
    for piece in handoff.pieces:
        data = np.empty(piece.n_bytes, dtype=np.uint8)
        if not read(handoff.path, piece.offset, data):
            raise HandoffError(f"{piece.group} of layer {piece.layer} is gone")
        arrived.append(data)
    return arrived


def adopt(handoff: Handoff, pool: DevicePool, lease: Lease, fingerprint: str, fetch: Fetch = shared_memory) -> None:
    """Copy a handoff's rows and state into the lease's pages: all, verified, or none. Raises HandoffError."""
    if handoff.fingerprint != fingerprint:
        raise HandoffError("it is of another model, dtype or layout")
    if handoff.n_tokens > lease.capacity_tokens:
        raise HandoffError(f"{handoff.n_tokens} tokens, the lease holds {lease.capacity_tokens}")
    parts = list(_parts(pool.layout, lease, handoff.n_tokens))
    expected = [(part.group, part.layer, part.n_bytes) for part in parts]
    if expected != [(piece.group, piece.layer, piece.n_bytes) for piece in handoff.pieces]:
        raise HandoffError("its pieces are not those of this model")
    arrived = fetch(handoff)
    for piece, data in zip(handoff.pieces, arrived, strict=True):
        # In own memory: what was verified is what is used, whatever becomes of the arena.
        if checksum(data) != piece.checksum:
            raise HandoffError(f"{piece.group} of layer {piece.layer} does not match its checksum")
    for part, data in zip(parts, arrived, strict=True):
        _scatter(pool, part, data)


def _parts(layout: Layout, lease: Lease, n_tokens: int) -> Iterator[_Part]:
    for paged in layout.paged:
        pages = lease.pages[paged.name][:, : -(-n_tokens // paged.page_tokens)]
        for layer, of_layer in zip(paged.layers, pages, strict=True):
            yield _Part(
                group=paged.name,
                layer=layer,
                pages=of_layer,
                page_bytes=paged.page_tokens * paged.row_bytes,
                n_bytes=paged.bytes_of(n_tokens),
            )
    for state in layout.states:
        for layer, of_layer in zip(state.layers, lease.pages[state.name], strict=True):
            yield _Part(
                group=state.name,
                layer=layer,
                pages=of_layer,
                page_bytes=state.state_bytes,
                n_bytes=state.state_bytes,
            )


def _scatter(pool: DevicePool, part: _Part, data: Bytes) -> None:
    whole = part.n_bytes // part.page_bytes
    pool.scatter(part.pages[:whole], data[: whole * part.page_bytes].reshape(whole, part.page_bytes))
    if whole < len(part.pages):
        pool.scatter(part.pages[whole:], data[whole * part.page_bytes :].reshape(1, -1))


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGN_BYTES) * ALIGN_BYTES

"""The handoff between nodes: Mooncake's Transfer Engine reads out of the exporter's arena, without its help.

Only this file and `pool_client` know Mooncake's modules. Its listeners take every interface: a trusted network.
"""

import numpy as np

from forebay.kvstore.arena import Arena
from forebay.kvstore.handoff import Bytes, Handoff, HandoffError, Peer
from forebay.kvstore.pool_address import PEER_TO_PEER, PoolError
from forebay.kvstore.pool_client import load

CHUNK_BYTES = 64 << 20
"""Of one read: a dead exporter is seen between two."""


class Engine:
    """This process's own. `host`: this node as others reach it. Raises PoolError."""

    def __init__(self, host: str, protocol: str, devices: str) -> None:
        self._engine = load("mooncake.engine").TransferEngine()
        code = self._engine.initialize(host, PEER_TO_PEER, protocol, devices)
        if code != 0:
            raise PoolError(f"the Transfer Engine does not start on {host} by {protocol}: code {code}")
        self._host = host
        self._buffer: Bytes = np.empty(0, dtype=np.uint8)

    def offer(self, arena: Arena) -> Peer:
        """Others may read the arena from now on."""
        address = self._register(arena.bytes)
        return Peer(session=f"{self._host}:{self._engine.get_rpc_port()}", address=address)

    def fetch(self, handoff: Handoff) -> list[Bytes]:
        """See `handoff.Fetch`. One contiguous stretch of the arena, in large reads."""
        if handoff.peer is None:
            raise HandoffError("it was not offered to other nodes")
        start, n_bytes = handoff.extent
        buffer = self._room(n_bytes)
        for at in range(0, n_bytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, n_bytes - at)
            source, target = handoff.peer.address + start + at, buffer.ctypes.data + at
            if self._engine.transfer_sync_read(handoff.peer.session, target, source, size) != 0:
                raise HandoffError(f"{handoff.peer.session} does not give it")
        return [buffer[piece.offset - start : piece.offset - start + piece.n_bytes] for piece in handoff.pieces]

    def _room(self, n_bytes: int) -> Bytes:
        """Registered once for all handoffs of that length."""
        if len(self._buffer) < n_bytes:
            if len(self._buffer):
                self._engine.unregister_memory(self._buffer.ctypes.data)
            self._buffer = np.zeros(n_bytes + n_bytes // 4, dtype=np.uint8)
            self._register(self._buffer)
        return self._buffer[:n_bytes]

    def _register(self, memory: Bytes) -> int:
        address = int(memory.ctypes.data)
        code = self._engine.register_memory(address, memory.nbytes)
        if code != 0:
            raise PoolError(f"{memory.nbytes} bytes cannot be registered with the Transfer Engine: code {code}")
        return address

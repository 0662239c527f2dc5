"""The way of handoffs that the configuration asks for: shared memory, or Mooncake's Transfer Engine."""

from typing import TYPE_CHECKING

from forebay.kvstore.arena import Arena
from forebay.kvstore.handoff import Fetch, Peer, shared_memory
from forebay.workers.config import WorkerConfig

if TYPE_CHECKING:
    from forebay.kvstore.handoff_engine import Engine


class Offer:
    """The exporter's side, kept as long as its arena. `peer`: what its handoffs name. Raises PoolError."""

    def __init__(self, config: WorkerConfig, arena: Arena) -> None:
        self._engine = None if config.handoff == "shared_memory" else _engine(config)
        self.peer: Peer | None = self._engine.offer(arena) if self._engine is not None else None


def fetch_of(config: WorkerConfig) -> Fetch:
    """The adopter's side. Raises PoolError."""
    return shared_memory if config.handoff == "shared_memory" else _engine(config).fetch


def _engine(config: WorkerConfig) -> "Engine":
    from forebay.kvstore.handoff_engine import Engine

    return Engine(config.handoff_host, config.handoff_protocol, config.handoff_devices)

"""How much a worker's store holds, where, and by which policies."""

from dataclasses import dataclass, field
from typing import Literal

from forebay.kvstore.policy import DEFAULT_CHECKPOINTS, PrefillCost, parse

WritePolicy = Literal["write_back", "write_through"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """`host_bytes` 0 turns the host tier off, `handoff_bytes` 0 the handoff arena."""

    device_bytes: int
    host_bytes: int = 0
    handoff_bytes: int = 0
    run_dir: str
    """Folder of this node's arenas, in shared memory where there is one."""

    checkpoints: str = DEFAULT_CHECKPOINTS
    write: WritePolicy = "write_back"
    """When pages go to the host: on eviction, or as soon as a page is full or a checkpoint is kept."""

    cost: PrefillCost = field(default_factory=PrefillCost)
    remembered_keys: int = 1 << 16
    """How many lost blocks and checkpoints are remembered, to say why a look-up missed."""

    def __post_init__(self) -> None:
        parse(self.checkpoints)
        assert min(self.device_bytes, self.remembered_keys) > 0
        assert min(self.host_bytes, self.handoff_bytes) >= 0

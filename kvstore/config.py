"""How much a worker's store holds, where, and by which policies."""

from dataclasses import dataclass
from typing import Literal, get_args

from forebay.kvstore.policy import DEFAULT_CHECKPOINTS, PrefillCost, parse

WritePolicy = Literal["write_back", "write_through"]
SsdWritePolicy = Literal["write_back", "write_through", "selective"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """`host_bytes` 0: no host tier. `handoff_bytes` 0: nothing is exported. Raises ValueError that names the field."""

    device_bytes: int
    host_bytes: int = 0
    handoff_bytes: int = 0
    run_dir: str
    """Folder of this node's arenas, in shared memory where there is one."""

    checkpoints: str = DEFAULT_CHECKPOINTS
    """Where prefill keeps states: kvstore.policy."""

    write: WritePolicy = "write_back"
    """When pages go to the host: on eviction, or as soon as a page is full or a checkpoint is kept."""

    ssd_path: str | None = None
    """Folder of the SSD tier, below which every cluster has one, and every worker in that. None: no SSD tier."""

    ssd_bytes: int = 0
    """How much of the disk one worker's SSD tier takes at most."""

    ssd_write: SsdWritePolicy = "write_back"
    """When pages go to the SSD: when they leave memory; as soon as a page is full or a checkpoint is kept; or with the
    `ssd_uses`-th request that uses them, the one that computed them being the first."""

    ssd_uses: int = 2
    ssd_queue_bytes: int = 1 << 28
    """What may wait to be written, or what the largest checkpoint takes if that is more: what comes when it is full
    is skipped."""

    prefill_token_s: float = 1e-4
    prefill_pair_s: float = 1e-10
    """What prefill costs a token, and a pair of tokens: how the eviction weighs long prefixes against short ones."""

    remembered_keys: int = 1 << 16
    """How many lost blocks and checkpoints are remembered, to say why a look-up missed."""

    def __post_init__(self) -> None:
        parse(self.checkpoints)
        if self.write not in get_args(WritePolicy):
            raise ValueError(f"write: {self.write!r} is none of {', '.join(get_args(WritePolicy))}")
        if self.ssd_write not in get_args(SsdWritePolicy):
            raise ValueError(f"ssd_write: {self.ssd_write!r} is none of {', '.join(get_args(SsdWritePolicy))}")
        if (self.ssd_path is None) != (self.ssd_bytes == 0):
            raise ValueError("ssd_path, ssd_bytes: the SSD tier takes both, or neither")
        for name in ("device_bytes", "remembered_keys", "prefill_token_s", "ssd_uses", "ssd_queue_bytes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: must be more than 0")
        for name in ("host_bytes", "handoff_bytes", "ssd_bytes", "prefill_pair_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: must not be less than 0")

    @property
    def cost(self) -> PrefillCost:
        return PrefillCost(token_s=self.prefill_token_s, pair_s=self.prefill_pair_s)

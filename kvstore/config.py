"""How much a worker's store holds, where, and by which policies."""

from dataclasses import dataclass
from typing import Literal, get_args

from forebay.kvstore.policy import DEFAULT_CHECKPOINTS, PrefillCost, parse

WritePolicy = Literal["write_back", "write_through"]


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

    prefill_token_s: float = 1e-4
    prefill_pair_s: float = 1e-10
    """What prefill costs a token, and a pair of tokens: how the eviction weighs long prefixes against short ones."""

    remembered_keys: int = 1 << 16
    """How many lost blocks and checkpoints are remembered, to say why a look-up missed."""

    def __post_init__(self) -> None:
        parse(self.checkpoints)
        if self.write not in get_args(WritePolicy):
            raise ValueError(f"write: {self.write!r} is none of {', '.join(get_args(WritePolicy))}")
        for name in ("device_bytes", "remembered_keys", "prefill_token_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: must be more than 0")
        for name in ("host_bytes", "handoff_bytes", "prefill_pair_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: must not be less than 0")

    @property
    def cost(self) -> PrefillCost:
        return PrefillCost(token_s=self.prefill_token_s, pair_s=self.prefill_pair_s)

"""What one worker is given: the model, its store, and the bounds of everything that waits."""

from dataclasses import dataclass
from typing import Literal

from forebay.kvstore.config import StoreConfig

Transfer = Literal["shared_memory", "mooncake"]
Mode = Literal["exact", "fast"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """`model` is a folder or a built-in name."""

    model: str = "demo"
    device: str = "cpu"
    """Where the model runs and its pages lie, as torch names it."""

    mode: Mode = "exact"
    """exact: fp32, and what a warm resume computes is bit for bit what a cold run does, whatever runs beside it. fast:
    bf16 by the GPU's fastest kernels, without that promise. All workers of a cluster run one mode."""

    block_tokens: int = 32
    threads: int = 1
    """Threads of torch in this process: the same number in all workers, since exact mode holds at one number."""

    store: StoreConfig
    """A decode worker needs neither the host tier nor the arena: it has no prefix cache and exports nothing."""

    chunk_tokens: int = 256
    """The absolute grid of prefill: some whole blocks. Between two chunks another prompt may go first."""

    queue_jobs: int = 256
    slots: int = 16
    """Sequences that one decode worker runs or has promised to run."""

    handoff: Transfer = "shared_memory"
    """How a finished prefill comes to its decode worker: by the node's own memory, or between nodes by Mooncake's
    Transfer Engine, which needs the extra `mooncake`."""

    handoff_host: str = "127.0.0.1"
    """This node, as the other ones reach it."""

    handoff_protocol: Literal["tcp", "rdma"] = "tcp"
    handoff_devices: str = ""
    """Names of the RDMA devices, with commas; empty: Mooncake chooses."""

    handoff_timeout_s: float = 60.0
    """How long a finished prefill waits to be fetched."""

    reservation_timeout_s: float = 120.0
    """How long a decode slot waits for its prefill."""

    ageing_tokens_per_s: float = 2048.0
    """What a second of waiting is worth to a prefill job, in tokens it does not have to compute."""

    canary_s: float = 0.0
    """How often an idle prefill worker compares a resume from its own tiers with a cold run, bit for bit as exact mode
    promises. Where they differ it takes no jobs any more and is replaced. 0: never."""

    prefetch_bytes: int = 1 << 28
    """How much of the host tier, half of it at most, is filled from the SSD and the pool for prompts that wait for
    their turn. 0: what lies there is read when the turn comes."""

    prefetch_prompts: int = 4
    """How many of them are read for at a time."""

    def __post_init__(self) -> None:
        assert self.chunk_tokens % self.block_tokens == 0, "the grid of prefill lies on block ends"
        assert min(self.threads, self.queue_jobs, self.slots, self.chunk_tokens, self.prefetch_prompts) >= 1
        assert self.canary_s >= 0, "canary_s: must not be less than 0"
        assert self.prefetch_bytes >= 0, "prefetch_bytes: must not be less than 0"

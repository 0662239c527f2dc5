"""What one worker is given: the model, its share of the machine, and the bounds of everything that waits."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """`model` is a folder or a built-in name. `chunk_tokens`, a multiple of the block, is the absolute grid of prefill."""

    model: str = "demo-random"
    block_tokens: int = 32
    threads: int = 1
    """Threads of torch: the same number in all workers, since exact mode holds at one number."""

    chunk_tokens: int = 512
    queue_jobs: int = 256
    slots: int = 16
    """Sequences that one decode worker runs or has promised to run."""

    device_bytes: int = 256 << 20
    host_bytes: int = 256 << 20
    checkpoints: str = "prompt_end+junction"
    """A policy's name: where prefill keeps states (kvstore.policy)."""

    handoff_bytes: int = 256 << 20
    handoff_timeout_s: float = 60.0
    """How long a finished prefill waits to be fetched."""

    reservation_timeout_s: float = 120.0
    """How long a decode slot waits for its prefill."""

    ageing_tokens_per_s: float = 2048.0
    """What a second of waiting is worth to a prefill job, in tokens it does not have to compute."""

    def __post_init__(self) -> None:
        assert self.chunk_tokens % self.block_tokens == 0, "the grid of prefill lies on block ends"
        assert min(self.threads, self.queue_jobs, self.slots) >= 1

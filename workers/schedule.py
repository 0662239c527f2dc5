"""Who goes next: pure functions of plain values, the same in a worker, a test and the simulator."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCandidate:
    """A job that could take the next chunk. `arrival` is a counter: earlier jobs have smaller ones."""

    job_id: str
    priority: int
    remaining_tokens: int
    waited_s: float
    arrival: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningSequence:
    job_id: str
    priority: int
    arrival: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """A prompt that waits for its turn. `slow_bytes` of its hit lie in slow tiers. `ahead_bytes` came up to the host
    before its turn, or are to; None: not begun. `coming`: not all is there yet."""

    job_id: str
    slow_bytes: int
    ahead_bytes: int | None
    coming: bool


def prefill_order(candidates: Iterable[PrefillCandidate], ageing_tokens_per_s: float) -> list[PrefillCandidate]:
    """Lower `priority` first; then the fewest uncached tokens still to compute, less what waiting has earned.

    A short job passes a long one between two chunks. A job of R tokens more than those that pass it is passed for at
    most R / `ageing_tokens_per_s` seconds: who came that much later has earned that much less.
    """
    return sorted(
        candidates,
        key=lambda c: (c.priority, c.remaining_tokens - ageing_tokens_per_s * c.waited_s, c.arrival),
    )


def next_ahead(queue: Sequence[Queued], *, bytes_max: int, prompts_max: int) -> tuple[str, int] | None:
    """Whose hit is to come up from slow tiers before its turn, and how much of it; `queue` in the order of turns.

    All prompts that wait take `bytes_max` of the host together at most, and `prompts_max` of them are read for at a
    time. Who comes first waits for room and nobody passes, so what came up is used before it makes way; what alone is
    more than all comes in part.
    """
    chosen = next((each for each in queue if each.slow_bytes and each.ahead_bytes is None), None)
    if chosen is None or sum(each.coming for each in queue) >= prompts_max:
        return None
    granted = min(chosen.slow_bytes, bytes_max)
    left = bytes_max - sum(each.ahead_bytes or 0 for each in queue)
    return (chosen.job_id, granted) if 0 < granted <= left else None


def chunk_end(start: int, n_prompt: int, chunk_tokens: int, checkpoints: Sequence[int]) -> int:
    """Where the chunk that begins at `start` ends: the next grid line, checkpoint or the prompt's end.

    The ends are a function of the prompt and the policy, not of where a hit let the job begin: every one that lies
    ahead of a hit is an end of the cold run too.
    """
    assert 0 <= start < n_prompt
    grid = (start // chunk_tokens + 1) * chunk_tokens
    return min([grid, n_prompt, *(at for at in checkpoints if at > start)])


def victim(running: Iterable[RunningSequence]) -> RunningSequence:
    """Whom to preempt when the pages are used up: the newest of the lowest priority (it has lost the least)."""
    return max(running, key=lambda sequence: (sequence.priority, sequence.arrival))

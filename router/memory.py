"""What each session is known to have cached and where it was placed last: the router's estimate, never the truth.

Bounded, least recently used out first. A cluster's generation grows when it comes back from the dead; what was known
of an older generation counts as nothing.
"""

from collections import OrderedDict
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a session's last turn ran, and when."""

    cluster: str
    at: float


@dataclass(slots=True)
class _Known:
    placement: Placement
    cached: dict[str, tuple[int, int]] = field(default_factory=dict)  # cluster -> (generation, tokens)


class SessionMemory:
    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        self._capacity = capacity
        self._sessions: OrderedDict[str, _Known] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def remember(self, session: str, cluster: str, generation: int, prompt_tokens: int, now: float) -> None:
        """A prompt of `prompt_tokens` was prefilled in the cluster: its full blocks are cached there from now on."""
        known = self._sessions.setdefault(session, _Known(Placement(cluster=cluster, at=now)))
        known.placement = Placement(cluster=cluster, at=now)
        known.cached[cluster] = (generation, prompt_tokens)
        self._sessions.move_to_end(session)
        if len(self._sessions) > self._capacity:
            self._sessions.popitem(last=False)

    def cached_tokens(self, session: str, cluster: str, generation: int) -> int:
        """Tokens of the session's last prompt there, 0 where nothing is known."""
        known = self._sessions.get(session)
        if known is None:
            return 0
        seen, tokens = known.cached.get(cluster, (generation, 0))
        return tokens if seen == generation else 0

    def placement(self, session: str) -> Placement | None:
        known = self._sessions.get(session)
        return known.placement if known else None


def uncached_tokens(prompt_tokens: int, cached_tokens: int, block_tokens: int) -> int:
    """Tokens to compute: a hit is whole blocks and never the whole prompt, since the last token gives the logits."""
    reach = min(cached_tokens, prompt_tokens - 1)
    return prompt_tokens - reach // block_tokens * block_tokens

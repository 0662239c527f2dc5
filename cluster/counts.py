"""What an ingress counts itself; what its workers count comes with their beats."""

from collections import Counter
from dataclasses import dataclass, field

from forebay.cluster.beat import Kind
from forebay.cluster.dispatch import Ending, Lost, NoWorker
from forebay.cluster.messages import Begun
from forebay.kvstore.moves import Tier
from forebay.workers.job import Failure


@dataclass(slots=True)
class Counts:
    open_jobs: int = 0
    lookup_tokens: Counter[str] = field(default_factory=Counter)
    hit_tokens: Counter[tuple[str, Tier]] = field(default_factory=Counter)
    misses: Counter[tuple[str, str]] = field(default_factory=Counter)
    retries: Counter[tuple[Kind, str]] = field(default_factory=Counter)
    endings: Counter[tuple[str, Kind, str]] = field(default_factory=Counter)

    def looked_up(self, class_name: str, n_prompt: int, begun: Begun) -> None:
        self.lookup_tokens[class_name] += n_prompt
        for tier, tokens in begun.tier_tokens.items():
            self.hit_tokens[class_name, tier] += tokens
        if begun.miss is not None:
            self.misses[class_name, begun.miss] += 1

    def retried(self, kind: Kind, reason: str) -> None:
        """`kind`: which worker the try was lost on; before a handoff was adopted that is taken to be the prefill's."""
        self.retries[kind, reason] += 1

    def ended(self, worker: str, kind: Kind, ending: Ending) -> None:
        self.endings[worker, kind, outcome(ending)] += 1


def outcome(ending: Ending) -> str:
    """The metric label: one of a closed list."""
    match ending:
        case Failure(kind=kind):
            return kind
        case Lost():
            return "lost"
        case NoWorker():
            return "no_workers"
        case _:
            return ending

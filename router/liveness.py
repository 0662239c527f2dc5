"""Which clusters are up: a machine fed with probe answers and refused connections. No clock, no I/O.

Down comes fast (a refused connection or a "not ready" at once, silence after `fall` probes), up comes slowly (`rise`
good probes in a row), so a cluster that flaps stays down. A cluster never seen before is up with its first good probe.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Probe = Literal["ready", "not_ready", "unreachable"]


@dataclass(slots=True)
class _Cluster:
    up: bool = False
    seen_up: bool = False
    good: int = 0  # ready answers in a row
    silent: int = 0  # unanswered probes in a row
    lost: bool = False  # unreachable since it was up last: its cache may be gone
    generation: int = 0
    answered_at: float | None = None  # last probe that got any answer


class Liveness:
    def __init__(self, names: Iterable[str], *, fall: int, rise: int, hung_s: float) -> None:
        assert fall >= 1
        assert rise >= 1
        self._clusters = {name: _Cluster() for name in names}
        self._fall = fall
        self._rise = rise
        self._hung_s = hung_s

    def observe(self, name: str, probe: Probe, now: float) -> None:
        cluster = self._clusters[name]
        if probe != "unreachable":
            cluster.answered_at, cluster.silent = now, 0
        match probe:
            case "ready":
                cluster.good += 1
                if cluster.good >= self._rise or not cluster.seen_up:
                    self._up(cluster)
            case "not_ready":
                self._down(cluster)
            case "unreachable":
                cluster.silent += 1
                cluster.good = 0
                if cluster.silent >= self._fall:
                    self.lose(name)

    def lose(self, name: str) -> None:
        """A connection was refused: down at once, and its cache is forgotten."""
        self._clusters[name].lost = True
        self._down(self._clusters[name])

    def refuse(self, name: str) -> None:
        """A request was answered "not ready": down at once, until probes say otherwise."""
        self._down(self._clusters[name])

    def is_up(self, name: str) -> bool:
        return self._clusters[name].up

    def alive(self) -> frozenset[str]:
        return frozenset(name for name, cluster in self._clusters.items() if cluster.up)

    def generation(self, name: str) -> int:
        """Grows each time the cluster comes back from being unreachable: what was known of its cache is void."""
        return self._clusters[name].generation

    def hung(self, now: float) -> list[str]:
        """Clusters that answered once and then were silent for `hung_s`: their open streams will not move again."""
        return [
            name
            for name, cluster in self._clusters.items()
            if not cluster.up and cluster.answered_at is not None and now - cluster.answered_at >= self._hung_s
        ]

    def _up(self, cluster: _Cluster) -> None:
        if not cluster.up and cluster.lost:
            cluster.generation += 1
        cluster.up, cluster.seen_up, cluster.lost = True, True, False

    def _down(self, cluster: _Cluster) -> None:
        cluster.up, cluster.good = False, 0

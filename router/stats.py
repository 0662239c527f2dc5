"""The router's facts, kept as plain numbers and told as samples of the metric table."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from forebay.ops.histogram import Histogram
from forebay.ops.metrics import BY_NAME, Sample
from forebay.router.budget import LaneView
from forebay.router.outcome import Outcome

NONE = "none"  # the label of a request that ended before it had a class or a cluster
_HISTOGRAMS = ("time_to_first_token_seconds", "request_duration_seconds", "inter_token_seconds")


class Stats:
    """Counts by (class, cluster). Every series of every class and cluster is there from the start, at zero."""

    def __init__(self, classes: Sequence[str], clusters: Sequence[str]) -> None:
        self.open_streams = 0
        self._served = [(each, cluster) for each in classes for cluster in clusters]
        self._clusters = list(clusters)
        self._outcomes: Counter[tuple[str, str, Outcome]] = Counter()
        self._tokens: dict[str, Counter[tuple[str, str]]] = {
            name: Counter() for name in ("prompt_tokens_total", "cached_tokens_total", "output_tokens_total")
        }
        self._histograms = {
            name: {key: Histogram(BY_NAME[f"forebay_{name}"].buckets) for key in self._served} for name in _HISTOGRAMS
        }
        self._failovers: Counter[tuple[str, str]] = Counter()

    def ended(self, class_name: str, cluster: str, outcome: Outcome) -> None:
        self._outcomes[class_name or NONE, cluster or NONE, outcome] += 1

    def answered(self, class_name: str, cluster: str, prompt: int, cached: int, output: int) -> None:
        """Tokens of a request that a cluster began to answer."""
        for name, tokens in zip(self._tokens, (prompt, cached, output), strict=True):
            self._tokens[name][class_name, cluster] += tokens

    def observe(self, name: str, class_name: str, cluster: str, value_s: float) -> None:
        """One observation of the histogram `name`, in seconds; never negative."""
        self._histograms[name][class_name, cluster].observe(max(0.0, value_s))

    def failed_over(self, cluster: str, reason: str) -> None:
        self._failovers[cluster, reason] += 1

    def samples(self, lanes: Mapping[str, Sequence[LaneView]], alive: Iterable[str]) -> list[Sample]:
        """All there is to tell. `lanes` are each cluster's budgets now, `alive` the clusters that are up."""
        return [*self._counters(), *self._gauges(lanes, set(alive))]

    def _counters(self) -> list[Sample]:
        samples = [
            _sample("requests_total", count, **{"class": name, "cluster": cluster, "outcome": outcome})
            for (name, cluster, outcome), count in self._outcomes.items()
        ]
        for metric, counts in self._tokens.items():
            samples += [_sample(metric, counts[key], **_labels(*key)) for key in self._served]
        for metric, histograms in self._histograms.items():
            samples += [
                Sample(name=f"forebay_{metric}", labels=_labels(*key), value=histogram.snapshot())
                for key, histogram in histograms.items()
            ]
        return samples + [
            _sample("failovers_total", count, cluster=cluster, reason=reason)
            for (cluster, reason), count in self._failovers.items()
        ]

    def _gauges(self, lanes: Mapping[str, Sequence[LaneView]], alive: set[str]) -> list[Sample]:
        queued: Counter[str] = Counter()
        samples = [_sample("open_streams", self.open_streams)]
        for cluster, views in lanes.items():
            for view in views:
                labels = _labels(view.class_name, cluster)
                samples.append(_sample("reserved_tokens", view.reserved_tokens, **labels))
                samples.append(_sample("reserved_bytes", view.reserved_bytes, **labels))
                queued[view.class_name] += view.queued
        samples += [_sample("queued_requests", count, **{"class": name}) for name, count in queued.items()]
        return samples + [_sample("cluster_up", float(name in alive), cluster=name) for name in self._clusters]


def _labels(class_name: str, cluster: str) -> dict[str, str]:
    return {"class": class_name, "cluster": cluster}


def _sample(name: str, value: float, **labels: str) -> Sample:
    return Sample(name=f"forebay_{name}", labels=labels, value=value)

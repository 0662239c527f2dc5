"""Prometheus exposition of plain samples. The only file that knows a metrics library."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from forebay.ops.histogram import Snapshot
from forebay.ops.metrics import BY_NAME, Metric, Sample

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(samples: Iterable[Sample]) -> bytes:
    """The text of a /metrics answer. A name, label or kind that is not in the table is a broken invariant."""
    families: dict[str, list[Sample]] = {}
    for sample in samples:
        _assert_in_table(sample)
        families.setdefault(sample.name, []).append(sample)
    registry = CollectorRegistry()
    registry.register(_Samples(families))
    return generate_latest(registry)


class _Samples(Collector):
    """Hands the samples to the library, in the table's order."""

    def __init__(self, families: dict[str, list[Sample]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Family]:
        for name, metric in BY_NAME.items():
            if name in self._families:
                yield _family(metric, self._families[name])


def _assert_in_table(sample: Sample) -> None:
    metric = BY_NAME.get(sample.name)
    assert metric is not None, f"{sample.name} is not in the metric table"
    assert set(sample.labels) == set(metric.labels), f"{sample.name} has labels {metric.labels}, not {sample.labels}"
    if isinstance(sample.value, Snapshot):
        assert metric.kind == "histogram", f"{sample.name} is a {metric.kind}"
        assert sample.value.bounds == metric.buckets, f"{sample.name} was observed with other buckets"
    else:
        assert metric.kind != "histogram", f"{sample.name} is a histogram"


def _family(metric: Metric, samples: list[Sample]) -> Family:
    values = {tuple(sample.labels[label] for label in metric.labels): sample.value for sample in samples}
    assert len(values) == len(samples), f"{metric.name} has two samples of the same labels"
    if metric.kind == "histogram":
        return _histogram(metric, values)
    make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = make(metric.name, metric.help, labels=metric.labels)
    for labels, value in values.items():
        assert not isinstance(value, Snapshot)
        family.add_metric(labels, value)
    return family


def _histogram(metric: Metric, values: dict[tuple[str, ...], float | Snapshot]) -> Family:
    family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    for labels, value in values.items():
        assert isinstance(value, Snapshot)
        family.add_metric(labels, buckets=_cumulative(value), sum_value=value.sum)
    return family


def _cumulative(snapshot: Snapshot) -> list[tuple[str, float]]:
    """Prometheus counts a bucket together with all below it."""
    total, buckets = 0, []
    for bound, count in zip((*map(str, snapshot.bounds), "+Inf"), snapshot.counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets

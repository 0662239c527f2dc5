"""The metric table keeps its own rules; exposition says exactly what was reported, and refuses what is not in it."""

import random
from itertools import pairwise

import pytest
from prometheus_client.parser import text_string_to_metric_families

from forebay.ops.exposition import CONTENT_TYPE, render
from forebay.ops.histogram import Histogram, Snapshot
from forebay.ops.metrics import BY_NAME, LABELS, STEP_BUCKETS_S, TABLE, WAIT_BUCKETS_S, Sample


def test_every_name_is_listed_once_and_styled_like_the_field() -> None:
    assert len(BY_NAME) == len(TABLE)
    for metric in TABLE:
        assert metric.name.startswith("forebay_")
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.name.endswith("_seconds") == (metric.kind == "histogram"), metric.name
        assert set(metric.labels) <= set(LABELS), metric.name
        assert metric.help.endswith("."), metric.name
        assert bool(metric.buckets) == (metric.kind == "histogram"), metric.name


def test_every_label_is_used() -> None:
    assert set(LABELS) == {label for metric in TABLE for label in metric.labels}


@pytest.mark.parametrize("buckets", [WAIT_BUCKETS_S, STEP_BUCKETS_S])
def test_buckets_resolve_cache_hits_and_reach_million_token_prompts(buckets: tuple[float, ...]) -> None:
    assert all(a < b for a, b in pairwise(buckets))
    assert sum(bound < 0.1 for bound in buckets) >= 5
    assert buckets[-1] >= 640


def test_histogram_counts_like_a_plain_scan() -> None:
    rng = random.Random(1)
    values = [rng.choice([rng.expovariate(1), rng.choice(WAIT_BUCKETS_S), 1e9]) for _ in range(500)]
    histogram = Histogram(WAIT_BUCKETS_S)
    for value in values:
        histogram.observe(value)
    snapshot = histogram.snapshot()
    edges = [float("-inf"), *WAIT_BUCKETS_S, float("inf")]
    assert list(snapshot.counts) == [sum(low < value <= high for value in values) for low, high in pairwise(edges)]
    assert snapshot.sum == pytest.approx(sum(values))
    assert snapshot.count == 500


def test_a_snapshot_does_not_move_and_times_counts_many() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(1.5, times=3)
    before = histogram.snapshot()
    histogram.observe(9.0)
    assert before == Snapshot(bounds=(1.0, 2.0), counts=(0, 3, 0), sum=4.5)
    assert histogram.snapshot().counts == (0, 3, 1)


def _served(value: float | Snapshot, name: str, cluster: str = "a") -> Sample:
    return Sample(name=f"forebay_{name}", labels={"class": "agent", "cluster": cluster}, value=value)


def test_exposition_reads_back_as_it_was_reported() -> None:
    histogram = Histogram(WAIT_BUCKETS_S)
    for value in (0.03, 0.07, 5000.0):
        histogram.observe(value)
    samples = [
        _served(7, "cached_tokens_total"),
        _served(9, "cached_tokens_total", 'b"\\\n'),
        Sample(name="forebay_open_streams", value=3),
        _served(histogram.snapshot(), "time_to_first_token_seconds"),
    ]
    families = {f.name: f for f in text_string_to_metric_families(render(samples).decode())}
    cached = {sample.labels["cluster"]: sample.value for sample in families["forebay_cached_tokens"].samples}
    assert cached == {"a": 7, 'b"\\\n': 9}
    assert families["forebay_cached_tokens"].type == "counter"
    assert families["forebay_open_streams"].samples[0].value == 3
    waits = families["forebay_time_to_first_token_seconds"]
    assert waits.documentation == BY_NAME["forebay_time_to_first_token_seconds"].help
    by_bound = {s.labels["le"]: s.value for s in waits.samples if s.name.endswith("_bucket")}
    assert (by_bound["0.02"], by_bound["0.04"], by_bound["0.08"], by_bound["2560.0"], by_bound["+Inf"]) == (
        0,
        1,
        2,
        2,
        3,
    )
    rest = {s.name.rpartition("_")[2]: s.value for s in waits.samples if not s.name.endswith("_bucket")}
    assert rest == {"count": 3, "sum": pytest.approx(5000.1)}
    assert CONTENT_TYPE.startswith("text/plain")


@pytest.mark.parametrize(
    ("sample", "complaint"),
    [
        (Sample(name="forebay_invented_total", value=1), "not in the metric table"),
        (Sample(name="forebay_open_streams", labels={"class": "agent"}, value=1), "has labels"),
        (Sample(name="forebay_cluster_up", value=1), "has labels"),
        (_served(1.0, "time_to_first_token_seconds"), "is a histogram"),
        (_served(Histogram(STEP_BUCKETS_S).snapshot(), "time_to_first_token_seconds"), "other buckets"),
        (_served(Histogram(WAIT_BUCKETS_S).snapshot(), "prompt_tokens_total"), "is a counter"),
    ],
)
def test_what_is_not_in_the_table_is_refused(sample: Sample, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        render([sample])


def test_the_same_series_twice_is_refused() -> None:
    with pytest.raises(AssertionError, match="two samples"):
        render([_served(1, "output_tokens_total"), _served(2, "output_tokens_total")])

"""The Grafana dashboard, made from the metric table: `python -m forebay.ops.dashboard > ops/forebay-dashboard.json`.

Panels that answer a question stand first. Every metric that none of them reads gets a panel of its own at the end,
so no metric is without a picture. Help texts and label filters come from the table.
"""

import json
import re

from forebay.ops.grafana import Json, Panel, Query, model, variable
from forebay.ops.metrics import BY_NAME, TABLE, Metric


def selector(metric: Metric) -> str:
    """The dashboard's variables as label filters, as far as the metric has those labels."""
    filters = [f'{label}=~"${label}"' for label in ("cluster", "class") if label in metric.labels]
    return "{" + ", ".join(filters) + "}" if filters else ""


def rate(name: str, by: str = "") -> str:
    """Sum of a counter's growth a second, by labels."""
    return f"sum{_by(by)} (rate({_series(name, 'counter')}[$__rate_interval]))"


def now(name: str, by: str = "") -> str:
    """Sum of a gauge, by labels."""
    return f"sum{_by(by)} ({_series(name, 'gauge')})"


def quantile(q: float, name: str, by: str) -> str:
    """A quantile of a histogram, by labels."""
    metric = BY_NAME[f"forebay_{name}"]
    assert metric.kind == "histogram"
    buckets = f"rate({metric.name}_bucket{selector(metric)}[$__rate_interval])"
    return f"histogram_quantile({q}, sum{_by(f'{by} le')} ({buckets}))"


def _series(name: str, kind: str) -> str:
    metric = BY_NAME[f"forebay_{name}"]
    assert metric.kind == kind, f"{metric.name} is a {metric.kind}"
    return f"{metric.name}{selector(metric)}"


def _by(labels: str) -> str:
    return f" by ({', '.join(labels.split())})" if labels else ""


def _legend(by: str) -> str:
    return " ".join(f"{{{{{label}}}}}" for label in by.split())


def _rates(title: str, name: str, by: str, unit: str, width: int = 8) -> Panel:
    return Panel(title=title, queries=(Query(expr=rate(name, by), legend=_legend(by)),), unit=unit, width=width)


def _levels(title: str, name: str, by: str, unit: str, width: int = 8) -> Panel:
    return Panel(title=title, queries=(Query(expr=now(name, by), legend=_legend(by)),), unit=unit, width=width)


def _quantiles(title: str, name: str, by: str) -> Panel:
    queries = tuple(
        Query(expr=quantile(q, name, by), legend=f"{_legend(by)} {shown}")
        for q, shown in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
    )
    return Panel(title=title, queries=queries, unit="s", help=BY_NAME[f"forebay_{name}"].help)


def _number(title: str, expr: str, unit: str) -> Panel:
    return Panel(title=title, queries=(Query(expr=expr),), unit=unit, kind="stat", width=4)


def _tokens_a_second() -> Panel:
    kinds = (("prompt", "prompt_tokens_total"), ("cached", "cached_tokens_total"), ("output", "output_tokens_total"))
    queries = tuple(Query(expr=rate(name), legend=shown) for shown, name in kinds)
    return Panel(title="Tokens a second, as clients see them", queries=queries, unit="short")


def _hit_rate_by_tier() -> Panel:
    # Every tier of a class is divided by the same look-ups, so the tiers add up to the class's hit rate.
    expr = f"{rate('hit_tokens_total', 'class tier')} / on (class) group_left () {rate('lookup_tokens_total', 'class')}"
    return Panel(
        title="Hit rate by class and tier",
        queries=(Query(expr=expr, legend=_legend("class tier")),),
        unit="percentunit",
        help="Share of looked-up prompt tokens that were restored, by the tier they lay in.",
    )


def _hit_rate(by: str = "") -> str:
    return f"{rate('hit_tokens_total', by)} / {rate('lookup_tokens_total', by)}"


def _decode_batch() -> Panel:
    expr = f"{rate('decode_tokens_total', 'cluster worker')} / {rate('decode_steps_total', 'cluster worker')}"
    return Panel(
        title="Sequences in a decode step",
        queries=(Query(expr=expr, legend=_legend("cluster worker")),),
        unit="short",
        help="Tokens divided by steps: the mean batch.",
    )


def _cache_bytes() -> Panel:
    by, worker = "cluster kind tier state", ", ".join(BY_NAME["forebay_page_bytes"].labels)
    bytes_now = f"{_series('pages', 'gauge')} * on ({worker}) group_left () {_series('page_bytes', 'gauge')}"
    query = Query(expr=f"sum{_by(by)} ({bytes_now})", legend=_legend(by))
    return Panel(title="Bytes by tier and state", queries=(query,), unit="bytes", width=6)


def rows() -> list[tuple[str, list[Panel]]]:
    """All panels, by row, in the order they are read."""
    featured = [
        ("At a glance", _glance()),
        ("What clients see", _clients()),
        ("Cache", _cache()),
        ("Workers", _workers()),
        ("Admission and failures", _admission()),
    ]
    text = " ".join(query.expr for _, panels in featured for panel in panels for query in panel.queries)
    rest = [_plain(metric) for metric in TABLE if not re.search(rf"\b{metric.name}(_bucket)?\b", text)]
    return [*featured, ("All other metrics", rest)] if rest else featured


def _glance() -> list[Panel]:
    return [
        _number("Requests a second", rate("requests_total"), "reqps"),
        _number("Streams open", now("open_streams"), "short"),
        _number("Hit rate", _hit_rate(), "percentunit"),
        _number("TTFT p95", quantile(0.95, "time_to_first_token_seconds", ""), "s"),
        _number("Clusters up", f"count(max by (cluster) ({_series('cluster_up', 'gauge')}) > 0) or vector(0)", "short"),
        _number("Workers", now("workers"), "short"),
    ]


def _clients() -> list[Panel]:
    return [
        _quantiles("Time to first token by class", "time_to_first_token_seconds", "class"),
        _quantiles("Time between tokens by class", "inter_token_seconds", "class"),
        _quantiles("Request duration by class", "request_duration_seconds", "class"),
        _rates("Requests by outcome", "requests_total", "outcome", "reqps"),
        _rates("Requests by cluster", "requests_total", "cluster", "reqps"),
        _tokens_a_second(),
    ]


def _cache() -> list[Panel]:
    by_class = Query(expr=_hit_rate("class"), legend=_legend("class"))
    return [
        Panel(title="Hit rate by class", queries=(by_class,), unit="percentunit"),
        _hit_rate_by_tier(),
        _rates("Misses by reason", "misses_total", "reason", "ops"),
        _levels("Pages by tier and state", "pages", "cluster kind tier state", "short", width=6),
        _cache_bytes(),
        _rates("Evictions by tier and cause", "evictions_total", "tier cause", "ops", width=6),
        _rates("Bytes restored by tier", "restored_bytes_total", "tier", "Bps", width=6),
        _rates("Seconds of restore a second, by lowest tier", "restore_seconds_total", "tier", "s", width=12),
        _rates("Bytes brought up before their turn, by tier", "prefetched_bytes_total", "tier", "Bps", width=12),
    ]


def _workers() -> list[Panel]:
    return [
        _levels("Slots by state", "slots", "cluster kind state", "short"),
        _levels("Jobs running", "jobs_running", "cluster worker", "short"),
        _levels("Jobs waiting", "jobs_waiting", "cluster worker", "short"),
        _rates("Prompt tokens computed a second", "prefill_tokens_total", "cluster worker", "short"),
        _rates("Tokens decoded a second", "decode_tokens_total", "cluster worker", "short"),
        _decode_batch(),
        _rates("Bytes handed to decode", "handoff_bytes_total", "cluster", "Bps"),
        _rates("Jobs by outcome", "jobs_total", "kind outcome", "ops"),
    ]


def _admission() -> list[Panel]:
    return [
        _levels("Tokens reserved in budgets", "reserved_tokens", "class cluster", "short"),
        _levels("Bytes reserved in budgets", "reserved_bytes", "class cluster", "bytes"),
        _levels("Requests queued", "queued_requests", "class", "short"),
        _levels("Cluster up, counted over routers", "cluster_up", "cluster", "short"),
        _rates("Failovers", "failovers_total", "cluster reason", "ops"),
        _rates("Worker restarts", "worker_restarts_total", "cluster kind", "ops"),
    ]


def _plain(metric: Metric) -> Panel:
    """The plain picture of one metric, by all its labels but the worker."""
    name, by = metric.name.removeprefix("forebay_"), " ".join(x for x in metric.labels if x != "worker")
    if metric.kind == "histogram":
        return _quantiles(name, name, by)
    expr = rate(name, by) if metric.kind == "counter" else now(name, by)
    return Panel(title=name, queries=(Query(expr=expr, legend=_legend(by)),), unit=_unit(metric), help=metric.help)


def _unit(metric: Metric) -> str:
    in_bytes = metric.name.removesuffix("_total").endswith("_bytes")
    if metric.kind == "counter":
        return "Bps" if in_bytes else "ops"
    return "bytes" if in_bytes else "short"


def dashboard() -> Json:
    """The whole dashboard as Grafana's JSON model."""
    choices = [variable("cluster", "forebay_cluster_up"), variable("class", "forebay_requests_total")]
    return model("Forebay", "A Forebay endpoint: its router, its clusters and their workers.", choices, rows())


def text() -> str:
    """The tracked file's content."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    print(text(), end="")

"""The one table of every metric. Exposition and dashboard are made from it; a name or label outside it is refused.

Rooms keep plain facts and report them as `Sample`s. Names follow the field's style: base units (seconds, bytes,
tokens) last, counters end in `_total`. Labels are closed or few, so the number of series stays small.
"""

from dataclasses import dataclass, field
from typing import Literal

from forebay.ops.histogram import Snapshot

Kind = Literal["counter", "gauge", "histogram"]
Source = Literal["router", "ingress"]

# What each label says. Where a closed list is written, no other value occurs.
LABELS = {
    "cluster": "name of the cluster that serves",
    "class": "request class (interactive, agent, batch, ...)",
    "outcome": "how a request or job ended, one of a closed list",
    "reason": "why, one of a closed list",
    "cause": "why a page was taken back, one of a closed list",
    "worker": "worker id",
    "kind": "prefill | decode",
    "tier": "hbm | dram | ssd | pool",
    "state": "of pages: free | leased | cached; of slots: free | used; of the SSD tier's bytes: held | queued",
}

# Cache hits answer in milliseconds, million-token prompts in minutes: one histogram must resolve both.
WAIT_BUCKETS_S = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0, 2560.0),
)
STEP_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 40.0, 160.0, 640.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric family. `buckets` are upper bounds in the metric's unit, ascending, without +Inf."""

    name: str
    kind: Kind
    source: Source
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One series' present value, with exactly the labels of its metric; a `Snapshot` for a histogram."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)
    value: float | Snapshot


def _router(name: str, kind: Kind, labels: str, text: str, buckets: tuple[float, ...] = ()) -> Metric:
    """A metric of the router's endpoint."""
    return Metric(
        name=f"forebay_{name}", kind=kind, source="router", labels=tuple(labels.split()), help=text, buckets=buckets
    )


def _ingress(name: str, kind: Kind, labels: str, text: str, buckets: tuple[float, ...] = ()) -> Metric:
    """A metric of an ingress' endpoint, which gathers its workers."""
    return Metric(
        name=f"forebay_{name}", kind=kind, source="ingress", labels=tuple(labels.split()), help=text, buckets=buckets
    )


_SERVED = "class cluster"
_WORKER = "cluster worker kind"

TABLE: tuple[Metric, ...] = (
    _router("requests_total", "counter", "class cluster outcome", "Requests ended, by how they ended."),
    _router("prompt_tokens_total", "counter", _SERVED, "Prompt tokens of answered requests, cached ones included."),
    _router("cached_tokens_total", "counter", _SERVED, "Prompt tokens that were reused instead of computed."),
    _router("output_tokens_total", "counter", _SERVED, "Tokens generated for clients."),
    _router(
        "time_to_first_token_seconds",
        "histogram",
        _SERVED,
        "From a request's arrival to its first token.",
        WAIT_BUCKETS_S,
    ),
    _router(
        "request_duration_seconds", "histogram", _SERVED, "From a request's arrival to its last byte.", WAIT_BUCKETS_S
    ),
    _router(
        "inter_token_seconds", "histogram", _SERVED, "Gap between two frames of tokens of one stream.", STEP_BUCKETS_S
    ),
    _router("reserved_tokens", "gauge", _SERVED, "Uncached prefill tokens reserved in budgets now."),
    _router("reserved_bytes", "gauge", _SERVED, "Resident cache bytes reserved in budgets now."),
    _router("queued_requests", "gauge", "class", "Requests waiting for admission now."),
    _router("open_streams", "gauge", "", "Requests in flight now, from admission to their last byte."),
    _router("cluster_up", "gauge", "cluster", "1 where the router takes the cluster for ready, else 0."),
    _router("failovers_total", "counter", "cluster reason", "Requests that left this cluster for their backup."),
    _ingress("pages", "gauge", f"{_WORKER} tier state", "Pages now; free + leased + cached of a tier is constant."),
    _ingress("page_bytes", "gauge", _WORKER, "Bytes of one page."),
    _ingress("slots", "gauge", f"{_WORKER} state", "Sequence slots now."),
    _ingress("jobs_running", "gauge", _WORKER, "Jobs in the worker's batch now."),
    _ingress("jobs_waiting", "gauge", _WORKER, "Jobs the worker holds but does not run now."),
    _ingress("open_jobs", "gauge", "cluster", "Jobs the ingress holds now, from admission to their last frame."),
    _ingress("jobs_total", "counter", f"{_WORKER} outcome", "Jobs ended in the worker, by how they ended."),
    _ingress("job_retries_total", "counter", "cluster kind reason", "Jobs the ingress submitted again."),
    _ingress("lookup_tokens_total", "counter", "cluster class", "Prompt tokens looked up in the cache."),
    _ingress("hit_tokens_total", "counter", "cluster class tier", "Prompt tokens restored, by where they lay."),
    _ingress("misses_total", "counter", "cluster class reason", "Look-ups whose hit ended early, by why."),
    _ingress("restored_bytes_total", "counter", f"{_WORKER} tier", "Bytes brought up to device memory from a tier."),
    _ingress(
        "restore_seconds_total",
        "counter",
        f"{_WORKER} tier",
        "Waited at prompts' turns for what their hits had below device memory, by the lowest tier.",
    ),
    _ingress(
        "prefetched_bytes_total",
        "counter",
        f"{_WORKER} tier",
        "Bytes brought from a tier into host memory for prompts that waited for their turn.",
    ),
    _ingress("evictions_total", "counter", f"{_WORKER} tier cause", "Cached pages given up, by tier and cause."),
    _ingress("ssd_bytes", "gauge", f"{_WORKER} state", "Bytes of the SSD tier on the disk, and on their way there."),
    _ingress(
        "ssd_events_total", "counter", f"{_WORKER} reason", "Writes skipped, the tier off, damage found at start."
    ),
    _ingress("pool_queued_bytes", "gauge", _WORKER, "Bytes on their way to the cluster-wide pool."),
    _ingress("pool_events_total", "counter", f"{_WORKER} reason", "Writes to the pool and reads that failed, by why."),
    _ingress("prefill_tokens_total", "counter", _WORKER, "Prompt tokens computed."),
    _ingress("decode_tokens_total", "counter", _WORKER, "Tokens that went through decode steps."),
    _ingress("decode_steps_total", "counter", _WORKER, "Decode steps, each over all running sequences."),
    _ingress("handoff_bytes_total", "counter", _WORKER, "Bytes handed from prefill to decode."),
    _ingress(
        "canary_runs_total", "counter", f"{_WORKER} outcome", "Resumes that an idle worker compared with a cold run."
    ),
    _ingress("preemptions_total", "counter", _WORKER, "Sequences stopped since pages ran out."),
    _ingress("workers", "gauge", "cluster kind", "Workers that beat now."),
    _ingress("beats_total", "counter", _WORKER, "Beats received from the worker."),
    _ingress("worker_restarts_total", "counter", "cluster kind", "Workers that took the place of a dead one."),
)

BY_NAME: dict[str, Metric] = {metric.name: metric for metric in TABLE}

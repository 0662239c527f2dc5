"""What an ingress and its workers count, as samples of the metric table (ops/metrics.py)."""

from collections.abc import Iterator, Mapping
from typing import Any

from forebay.cluster.beat import Kind
from forebay.cluster.config import KINDS
from forebay.cluster.counts import Counts
from forebay.cluster.ingress import Ingress
from forebay.cluster.registry import Entry
from forebay.kvstore.moves import Tier
from forebay.ops.metrics import Sample

TIER_LABELS: dict[Tier, str] = {"device": "hbm", "host": "dram", "ssd": "ssd", "pool": "pool"}


def samples(ingress: Ingress) -> Iterator[Sample]:
    """Everything of one cluster: the ingress' own counts, and what its workers' last beats said."""
    yield from _ingress_samples(ingress.counts, ingress.cluster)
    workers = ingress.workers()
    for kind in KINDS:
        labels = {"cluster": ingress.cluster, "kind": kind}
        yield _sample("workers", labels, sum(entry.beat.kind == kind for entry in workers.values()))
        yield _sample("worker_restarts_total", labels, ingress.restarts(kind))
    for name, entry in workers.items():
        yield from _worker_samples(entry, {"cluster": ingress.cluster, "worker": name, "kind": entry.beat.kind})


def _sample(name: str, labels: Mapping[str, str], value: float) -> Sample:
    return Sample(name=f"forebay_{name}", labels=dict(labels), value=value)


def _ingress_samples(counts: Counts, cluster: str) -> Iterator[Sample]:
    own = {"cluster": cluster}
    yield _sample("open_jobs", own, counts.open_jobs)
    for class_name, tokens in counts.lookup_tokens.items():
        yield _sample("lookup_tokens_total", {**own, "class": class_name}, tokens)
    for (class_name, tier), tokens in counts.hit_tokens.items():
        yield _sample("hit_tokens_total", {**own, "class": class_name, "tier": TIER_LABELS[tier]}, tokens)
    for (class_name, reason), number in counts.misses.items():
        yield _sample("misses_total", {**own, "class": class_name, "reason": reason}, number)
    for (kind, reason), number in counts.retries.items():
        yield _sample("job_retries_total", {**own, "kind": kind, "reason": reason}, number)
    for (worker, kind, outcome), number in counts.endings.items():
        yield _sample("jobs_total", {**own, "worker": worker, "kind": kind, "outcome": outcome}, number)


def _worker_samples(entry: Entry, labels: Mapping[str, str]) -> Iterator[Sample]:
    stats = entry.beat.pulse.stats
    running = stats.jobs - stats.queued_jobs
    yield _sample("jobs_running", labels, running)
    yield _sample("jobs_waiting", labels, stats.queued_jobs)
    yield _sample("slots", {**labels, "state": "used"}, stats.slots_used)
    yield _sample("slots", {**labels, "state": "free"}, stats.slots - stats.slots_used)
    yield _sample("beats_total", labels, entry.beats)
    yield from _KIND_SAMPLES[entry.beat.kind](stats, labels)
    yield from _store_samples(stats.store, labels)


def _prefill_samples(stats: Any, labels: Mapping[str, str]) -> Iterator[Sample]:
    yield _sample("prefill_tokens_total", labels, stats.computed_tokens)
    yield _sample("handoff_bytes_total", labels, stats.exported_bytes)
    yield _sample("canary_runs_total", {**labels, "outcome": "passed"}, stats.canary_passed)
    yield _sample("canary_runs_total", {**labels, "outcome": "failed"}, stats.canary_failed)


def _decode_samples(stats: Any, labels: Mapping[str, str]) -> Iterator[Sample]:
    yield _sample("decode_tokens_total", labels, stats.generated_tokens)
    yield _sample("decode_steps_total", labels, stats.steps)
    yield _sample("preemptions_total", labels, stats.preemptions)


_KIND_SAMPLES: dict[Kind, Any] = {"prefill": _prefill_samples, "decode": _decode_samples}


def _store_samples(store: Any, labels: Mapping[str, str]) -> Iterator[Sample]:
    yield _sample("page_bytes", labels, store.page_bytes)
    for tier in store.tiers:
        for state in ("free", "leased", "cached"):
            at = {**labels, "tier": TIER_LABELS[tier.tier], "state": state}
            yield _sample("pages", at, getattr(tier, f"{state}_pages"))
    for name, n_bytes in store.restored_bytes.items():
        yield _sample("restored_bytes_total", {**labels, "tier": TIER_LABELS[name]}, n_bytes)
    for name, seconds in store.restore_s.items():
        yield _sample("restore_seconds_total", {**labels, "tier": TIER_LABELS[name]}, seconds)
    for name, n_bytes in store.prefetched_bytes.items():
        yield _sample("prefetched_bytes_total", {**labels, "tier": TIER_LABELS[name]}, n_bytes)
    yield _sample("ssd_bytes", {**labels, "state": "held"}, store.ssd_held_bytes)
    yield _sample("ssd_bytes", {**labels, "state": "queued"}, store.ssd_queued_bytes)
    for reason, number in store.ssd_events.items():
        yield _sample("ssd_events_total", {**labels, "reason": reason}, number)
    yield _sample("pool_queued_bytes", labels, store.pool_queued_bytes)
    for reason, number in store.pool_events.items():
        yield _sample("pool_events_total", {**labels, "reason": reason}, number)
    for (name, cause), number in store.evicted_pages.items():
        yield _sample("evictions_total", {**labels, "tier": TIER_LABELS[name], "cause": cause}, number)

"""One worker as `forebay status` and the ingress' /status show it."""

from typing import Any

from forebay.cluster.registry import Entry, State


def worker_status(entry: Entry, state: State) -> dict[str, Any]:
    stats = entry.beat.pulse.stats
    return {
        "worker": entry.beat.worker,
        "kind": entry.beat.kind,
        "pid": entry.beat.pid,
        "node": entry.beat.node,
        "state": state,
        "jobs": stats.jobs,
        "queued_jobs": stats.queued_jobs,
        "slots": stats.slots,
        "slots_used": stats.slots_used,
        "handoffs": stats.handoffs,
        "freed_after_s": entry.beat.freed_after_s,
        "pages": {
            tier.tier: {
                "free": tier.free_pages,
                "leased": tier.leased_pages,
                "cached": tier.cached_pages,
                "total": tier.total_pages,
            }
            for tier in stats.store.tiers
        },
    }

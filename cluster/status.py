"""`forebay status`: clusters and workers of a running endpoint, as a table or as JSON."""

import json
import sys
import urllib.error
import urllib.request
from typing import Any

WAIT_S = 3.0
COLUMNS = ("worker", "kind", "state", "pid", "node", "slots", "jobs", "pages")


def get_json(url: str) -> dict[str, Any] | None:
    """None where nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
            value: dict[str, Any] = json.load(answer)
            return value
    except (OSError, ValueError):
        return None


def ingress_status(port: int) -> dict[str, Any] | None:
    return get_json(f"http://127.0.0.1:{port}/status")


def status(url: str, as_json: bool) -> int:
    found = get_json(f"{url}/status")
    if found is None:
        print(f"forebay: no endpoint answers at {url}: `forebay up`, or name it with --url", file=sys.stderr)
        return 1
    print(json.dumps(found, indent=1) if as_json else "\n".join(_lines(found)))
    return 0


def _lines(found: dict[str, Any]) -> list[str]:
    ready = "draining" if found["draining"] else "ready" if found["ready"] else "not ready"
    lines = [f"router     {ready}   model {found['model']}   open requests {found['open_requests']}"]
    if (pool := found.get("pool")) is not None:
        own = f"   master pid {pool['master_pid']}, restarts {pool['restarts']}" if "master_pid" in pool else ""
        lines.append(f"pool       {pool['address']}{own}")
    for cluster in found["clusters"]:
        lines.append("")
        lines += _cluster_lines(cluster)
    return lines


def _cluster_lines(cluster: dict[str, Any]) -> list[str]:
    own = cluster["status"]
    if own is None:
        return [f"cluster {cluster['name']}   no answer from {cluster['url']}"]
    state = "ready" if own["ready"] else "not ready"
    head = f"cluster {cluster['name']}   {state}   ingress pid {own['pid']}   open jobs {own['open_jobs']}"
    rows = [COLUMNS, *(_cells(worker) for worker in own["workers"])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    return [head, *("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)]


def _cells(worker: dict[str, Any]) -> tuple[str, ...]:
    slots = f"{worker['slots_used']}/{worker['slots']}" if worker["slots"] else "-"
    pages = "  ".join(
        f"{tier}: {count['leased']} leased, {count['cached']} cached, {count['free']} free"
        for tier, count in worker["pages"].items()
        if count["total"]
    )
    node = worker["node"][:8]
    jobs = f"{worker['jobs']} ({worker['queued_jobs']} queued)"
    return (worker["worker"], worker["kind"], worker["state"], str(worker["pid"]), node, slots, jobs, pages)

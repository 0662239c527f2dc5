"""The verbs that talk to a running endpoint."""

import json
import subprocess
from pathlib import Path

import pytest
from endpoint import FOREBAY, Endpoint

pytestmark = pytest.mark.endpoint


def test_status_shows_every_worker_with_node_pid_state_slots_and_pages(endpoint: Endpoint) -> None:
    found = endpoint.status()
    assert found["ready"]
    assert [cluster["name"] for cluster in found["clusters"]] == ["c1", "c2"]
    for cluster in found["clusters"]:
        assert cluster["up"]
        kinds = [worker["kind"] for worker in cluster["status"]["workers"]]
        assert sorted(kinds) == ["decode", "prefill"]
        for worker in cluster["status"]["workers"]:
            assert Path(f"/proc/{worker['pid']}").exists()
            assert worker["node"]
            assert worker["state"] in ("live", "busy")
            assert worker["slots"] == (16 if worker["kind"] == "decode" else 0)
            for pages in worker["pages"].values():
                assert pages["free"] + pages["leased"] + pages["cached"] == pages["total"]
    table = endpoint.command("status", "--url", endpoint.url).stdout
    for worker in found["clusters"][0]["status"]["workers"]:
        assert f"{worker['worker']}  {worker['kind']:7}" in table


def test_chat_answers(endpoint: Endpoint) -> None:
    result = subprocess.run(
        [FOREBAY, "chat", "--url", endpoint.url, "--max-tokens", "8"],
        input="Hello\nAnd again\n\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert endpoint.model in result.stdout
    assert result.stdout.count("> ") >= 3


def test_route_is_what_the_router_does(endpoint: Endpoint) -> None:
    primary, backup = endpoint.route("a session")
    assert endpoint.command("route", "a session").stdout.split() == ["primary", primary, "backup", backup]


def test_a_trace_is_replayed(endpoint: Endpoint, tmp_path: Path) -> None:
    trace, report = tmp_path / "trace.jsonl", tmp_path / "report.json"
    lines = [
        {"timestamp": 100 * n, "input_length": 512 * (3 + n), "output_length": 4, "hash_ids": list(range(3 + n))}
        for n in range(4)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ("--block-tokens", "32", "--api", "completions", "--json", str(report))
    endpoint.command("replay", str(trace), "--url", endpoint.url, *flags)
    made = json.loads(report.read_text())
    assert set(made) == {"machine", "versions", "rows"}
    assert {"name", "value", "unit", "reference", "ratio"} == set(made["rows"][0])

"""The tracked dashboard is fresh, shows every metric, and a real Prometheus answers each of its queries with data."""

import http.server
import itertools
import json
import math
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from forebay.ops.dashboard import dashboard, text
from forebay.ops.exposition import CONTENT_TYPE, render
from forebay.ops.histogram import Histogram
from forebay.ops.metrics import TABLE, Metric, Sample

TRACKED = Path(__file__).resolve().parents[1] / "ops" / "forebay-dashboard.json"
PROMETHEUS = shutil.which("prometheus")
VALUES = {"state": ("free", "leased", "cached", "used"), "tier": ("hbm", "dram"), "cluster": ("a", "b")}


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def test_the_tracked_file_is_fresh() -> None:
    assert TRACKED.read_text() == text(), "run: python -m forebay.ops.dashboard > ops/forebay-dashboard.json"


def test_every_metric_is_shown() -> None:
    shown = " ".join(expressions())
    for metric in TABLE:
        assert f"{metric.name}{{" in shown or f"{metric.name}_bucket{{" in shown or f"({metric.name})" in shown


def test_panels_fill_the_grid_without_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert all(0 <= x < 24 for x, _ in cells), panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(ids)) == len(ids)


def test_variables_are_the_ones_the_queries_use() -> None:
    made = dashboard()
    assert [variable["name"] for variable in made["templating"]["list"]] == ["datasource", "cluster", "class"]
    assert made["schemaVersion"] >= 39
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in panels())
    used = set(
        itertools.chain.from_iterable(part.split('"')[:1] for e in expressions() for part in e.split('=~"$')[1:])
    )
    assert used == {"cluster", "class"}


def _samples(tick: int) -> list[Sample]:
    return [
        Sample(name=metric.name, labels=dict(zip(metric.labels, values, strict=True)), value=_value(metric, tick))
        for metric in TABLE
        for values in itertools.product(*(VALUES.get(label, ("x",)) for label in metric.labels))
    ]


def _value(metric: Metric, tick: int) -> Any:
    if metric.kind != "histogram":
        return 10.0 * tick if metric.kind == "counter" else 1.0
    histogram = Histogram(metric.buckets)
    histogram.observe(0.05, times=tick)
    return histogram.snapshot()


@contextmanager
def _exporter() -> Iterator[int]:
    """An HTTP server whose counters grow with every scrape."""
    ticks = itertools.count(1)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = render(_samples(next(ticks)))
            self.send_response(200)
            self.send_header("content-type", CONTENT_TYPE)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


@contextmanager
def _prometheus(folder: Path, target_port: int) -> Iterator[str]:
    assert PROMETHEUS is not None
    job = {"job_name": "forebay", "static_configs": [{"targets": [f"127.0.0.1:{target_port}"]}]}
    every = {"scrape_interval": "200ms", "scrape_timeout": "200ms"}
    (folder / "p.yml").write_text(json.dumps({"global": every, "scrape_configs": [job]}))
    port = _free_port()
    command = [PROMETHEUS, f"--config.file={folder / 'p.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    process = subprocess.Popen(
        [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def _ask(url: str, expr: str) -> list[float]:
    """The values that an instant query returns; an expression that does not parse raises."""
    with urllib.request.urlopen(f"{url}/api/v1/query?{urllib.parse.urlencode({'query': expr})}", timeout=10) as answer:
        return [float(series["value"][1]) for series in json.load(answer)["data"]["result"]]


def _wait_for_scrapes(url: str, number: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if (_ask(url, "max(forebay_output_tokens_total)") or [0.0])[0] >= 10.0 * number:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise AssertionError("Prometheus did not scrape")


def _concrete(expr: str) -> str:
    return expr.replace("$cluster", ".*").replace("$class", ".*").replace("$__rate_interval", "30s")


@pytest.mark.skipif(PROMETHEUS is None, reason="needs the Debian package prometheus")
def test_prometheus_answers_every_query_with_data(tmp_path: Path) -> None:
    with _exporter() as target_port, _prometheus(tmp_path, target_port) as url:
        _wait_for_scrapes(url, 4)
        for expr in expressions():
            values = _ask(url, _concrete(expr))
            assert values, f"no data: {expr}"
            assert all(math.isfinite(value) for value in values), f"{values}: {expr}"
            assert any(value > 0 for value in values), f"nothing but zero: {expr}"
        with pytest.raises(urllib.error.HTTPError):
            _ask(url, "sum by (class (forebay_open_streams)")
        assert _ask(url, "forebay_invented_total") == []
        assert _ask(url, "count(forebay_cluster_up)") == [2.0]

"""A real endpoint for tests: `forebay up` as a subprocess, on free ports, with a run folder of its own."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from forebay.cluster.config import EndpointConfig
from forebay.cluster.route import pair

FOREBAY = Path(sys.executable).with_name("forebay")
START_S = 180.0


@dataclass
class Endpoint:
    """`output` is the file that holds what it prints and logs."""

    url: str
    model: str
    process: subprocess.Popen[bytes]
    run_dir: Path
    output: Path
    ports: list[int] = field(default_factory=list)

    def route(self, session: str) -> tuple[str, str | None]:
        """Primary and backup cluster of a session key, as `forebay route` prints them."""
        return pair(EndpointConfig(clusters=len(self.ports)), session)

    def command(self, *words: str) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run([FOREBAY, *words], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done

    def status(self) -> dict[str, Any]:
        """`forebay status --json`."""
        found: dict[str, Any] = json.loads(self.command("status", "--json", "--url", self.url).stdout)
        return found

    def cluster(self, name: str) -> dict[str, Any]:
        """What the ingress of one cluster says of itself and its workers."""
        status: dict[str, Any] = httpx.get(f"{self.ingress_url(name)}/status", timeout=10).json()
        return status

    def workers(self, name: str, kind: str) -> list[dict[str, Any]]:
        return [worker for worker in self.cluster(name)["workers"] if worker["kind"] == kind]

    def ingress_url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[int(name.removeprefix('c')) - 1]}"

    def metrics(self, name: str | None = None) -> dict[str, float]:
        """Series of the router, or of a cluster, by name with labels as they are printed."""
        url = self.url if name is None else self.ingress_url(name)
        lines = httpx.get(f"{url}/metrics", timeout=10).text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {series: float(value) for series, value in pairs}

    def wait_ready(self, *clusters: str, wait_s: float = 60.0) -> None:
        """Until these clusters are up for the router, each with a live worker of either kind."""

        def are_ready() -> bool:
            told = self.status()["clusters"]  # of a cluster just killed: up, and no status
            return {each["name"] for each in told if each["up"] and (each["status"] or {}).get("ready")} >= set(
                clusters
            )

        wait_until(are_ready, wait_s, f"{clusters} did not come back")

    def published(self) -> dict[str, Any]:
        """What `up` wrote of itself into its run folder."""
        found: dict[str, Any] = json.loads((self.run_dir / "endpoint.json").read_text())
        return found

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)


def wait_until(condition: Callable[[], bool], wait_s: float, message: str) -> float:
    """Seconds until it held."""
    started = time.monotonic()
    while time.monotonic() - started < wait_s:
        with contextlib.suppress(httpx.HTTPError):
            if condition():
                return time.monotonic() - started
        time.sleep(0.05)
    raise AssertionError(f"{message} within {wait_s} s")


def free_ports(count: int) -> list[int]:
    """Ports that follow each other and are free now."""
    for first in range(20_000 + os.getpid() % 5_000, 60_000, count):
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return list(range(first, first + count))
    raise AssertionError("no free ports")


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """Ray's sockets lie below a run folder, so pytest's own folders have too long names."""
    with tempfile.TemporaryDirectory(prefix="fb-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextlib.contextmanager
def running(folder: Path, *flags: str, clusters: int = 2) -> Iterator[Endpoint]:
    """An endpoint until the block ends; it is killed with all that it started if it does not stop by itself."""
    port, *ingress_ports = free_ports(1 + clusters)
    command = [
        *(
            FOREBAY,
            "up",
            "--model",
            "demo-random",
            "--port",
            str(port),
            "--clusters",
            str(clusters),
            "--run-dir",
            str(folder / "run"),
        ),
        *flags,
    ]
    output = folder / "up.log"
    with output.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    endpoint = Endpoint(f"http://127.0.0.1:{port}", "demo-random", process, folder / "run", output, ingress_ports)
    try:
        _wait_started(endpoint)
        yield endpoint
    finally:
        if process.poll() is None:
            endpoint.stop()


def _wait_started(endpoint: Endpoint) -> None:
    def started() -> bool:
        if endpoint.process.poll() is not None:
            raise AssertionError(f"forebay up ended: {endpoint.output.read_text()}")
        return httpx.get(f"{endpoint.url}/ready", timeout=5).status_code == 200

    wait_until(started, START_S, "the endpoint was not ready")

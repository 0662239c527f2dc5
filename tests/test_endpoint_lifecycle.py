"""An endpoint's beginning and end: signals, what a killed one leaves, and one-line answers to common mistakes."""

import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from endpoint import FOREBAY, Endpoint, free_ports, running, short_folder, wait_until
from streams import Streams

from forebay.cluster import processes
from forebay.cluster.processes import Process

pytestmark = [pytest.mark.endpoint, pytest.mark.timeout(600)]


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


def below(endpoint: Endpoint) -> list[Process]:
    return processes.descendants([endpoint.process.pid])


def memory_of(endpoint: Endpoint) -> Path:
    return Path(endpoint.published()["memory"])


def up(*flags: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([FOREBAY, "up", *flags], capture_output=True, text=True, timeout=60)


def assert_one_line(result: "subprocess.CompletedProcess[str]", *words: str) -> None:
    assert result.returncode != 0
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    for word in words:
        assert word in result.stderr


def test_a_terminated_endpoint_drains_and_leaves_nothing(folder: Path) -> None:
    with running(folder, clusters=1) as endpoint:
        started, memory = below(endpoint), memory_of(endpoint)
        assert len(started) > 5
        assert list(memory.iterdir())
        ask = {"model": endpoint.model, "prompt": "a short one", "max_tokens": 30, "ignore_eos": True}
        streams = Streams(endpoint.url, [(ask, "drained"), (ask | {"max_tokens": 8000}, "cut off")])
        streams.wait_open(2)
        endpoint.process.send_signal(signal.SIGTERM)
        assert endpoint.process.wait(timeout=20) == 0
        short, long = streams.wait()
        assert short.finish == "length"
        assert long.error is not None
        assert processes.wait_gone(started, 1.0) == []
        assert not memory.exists()
        assert [entry.name for entry in endpoint.run_dir.iterdir()] == ["lock"]
        assert "Traceback" not in endpoint.output.read_text()


def test_the_next_start_sweeps_what_a_killed_one_left(folder: Path) -> None:
    with running(folder, clusters=1) as endpoint:
        left, memory = below(endpoint), memory_of(endpoint)
        os.kill(endpoint.process.pid, signal.SIGKILL)
        endpoint.process.wait()
        assert any(map(processes.alive, left))
        assert memory.exists()
    with running(folder, clusters=1) as endpoint:
        assert re.search(
            r"swept what a killed endpoint left: \d+ processes, [1-9]\d* files", endpoint.output.read_text()
        )
        assert not any(map(processes.alive, left))
        assert memory_of(endpoint).exists()
        taken = up("--run-dir", str(endpoint.run_dir), "--port", str(free_ports(3)[0]))
        assert_one_line(taken, "runs in", str(endpoint.process.pid))
        # A second signal, while it drains, ends everything at once.
        started = below(endpoint)
        ask = {"model": endpoint.model, "prompt": "long", "max_tokens": 8000, "ignore_eos": True}
        streams = Streams(endpoint.url, [(ask, "s")])
        streams.wait_open(1)
        endpoint.process.send_signal(signal.SIGINT)
        wait_until(lambda: httpx.get(f"{endpoint.url}/ready", timeout=5).status_code == 503, 5, "readiness is not off")
        endpoint.process.send_signal(signal.SIGINT)
        endpoint.process.wait(timeout=4)
        assert processes.wait_gone(started, 1.0) == []
        streams.wait()


def test_a_signal_while_it_starts_ends_everything(folder: Path) -> None:
    command = [FOREBAY, "up", "--port", str(free_ports(3)[0]), "--run-dir", str(folder / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "starting 2 clusters" in line:
            break
    started = processes.descendants([process.pid])
    assert started
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors.splitlines() == ["forebay: stopped before it was ready"]
    assert processes.wait_gone(started, 1.0) == []
    assert [entry.name for entry in (folder / "run").iterdir()] == ["lock"]


def test_a_pool_that_holds_no_sequence_is_named(folder: Path) -> None:
    config = folder / "tiny.toml"
    config.write_text(
        f'port = {free_ports(2)[0]}\nclusters = 1\nrun_dir = "{folder / "run"}"\n[store]\ndevice_bytes = 1\n'
    )
    result = up(str(config))
    assert_one_line(result, "device_bytes = 1")
    assert [entry.name for entry in (folder / "run").iterdir()] == ["lock"]


def test_a_taken_port_is_named(folder: Path) -> None:
    port = free_ports(3)[0]
    for at, way_out in ((port, "--port"), (port + 1, "ingress_port")):
        with socket.create_server(("127.0.0.1", at)):
            result = up("--port", str(port), "--run-dir", str(folder / "run"))
        assert_one_line(result, f"port {at}", way_out)


def test_a_bad_folder_is_named(folder: Path) -> None:
    flags = ("--port", str(free_ports(3)[0]), "--run-dir", str(folder / "run"))
    assert_one_line(up(*flags, "--model", "/no/such/folder"), "/no/such/folder", "no such folder")
    assert_one_line(up(*flags, "--model", "no-such-name"), "no-such-name", "demo-random")
    (folder / "empty").mkdir()
    assert_one_line(up(*flags, "--model", str(folder / "empty")), "config.json")


def test_too_little_memory_is_named_before_anything_starts(folder: Path) -> None:
    config = folder / "large.toml"
    config.write_text(f'port = {free_ports(3)[0]}\nrun_dir = "{folder / "run"}"\n[store]\ndevice_bytes = {1 << 50}\n')
    assert_one_line(up(str(config)), "GiB needed", "device_bytes")


def test_a_long_run_folder_is_named(folder: Path) -> None:
    assert_one_line(up("--run-dir", str(folder / ("long" * 20))), "--run-dir", "shorter")


def test_a_wrong_key_is_named(folder: Path) -> None:
    config = folder / "wrong.toml"
    config.write_text("clusterz = 2\n")
    assert_one_line(up(str(config)), "clusterz", "did you mean clusters?")

"""A router process and SIGTERM: not ready at once, streams finish or end with one framed error, exit 0."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
from fake_ingress import FakeIngress, running, until
from router_house import BLOCK, body, events, say, tokenizer_folder

from forebay.router import log

SCRIPT = """
import sys
from forebay.router.config import ClusterConfig, ModelConfig, RouterConfig
from forebay.router.main import serve
folder, url, port, drain_s = sys.argv[1:]
model = ModelConfig(name="tiny", folder=folder, context_tokens=4096, block_tokens=8, token_bytes=10, state_bytes=10)
sys.exit(serve(RouterConfig(port=int(port), clusters=(ClusterConfig(name="a", url=url),), model=model,
                            probe_every_s=0.05, drain_s=float(drain_s)), on_started=lambda: print("up", flush=True)))
"""


@contextlib.contextmanager
def process(tmp_path, drain_s):
    """A router of one fake cluster in a process of its own."""
    fake = FakeIngress(say("word " * 20), BLOCK)
    with running(fake.app) as (url, _), socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
        free.close()
        command = [sys.executable, "-c", SCRIPT, str(tokenizer_folder(tmp_path)), url, port, str(drain_s)]
        router = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            assert router.stdout.readline() == "up\n"
            base = f"http://127.0.0.1:{port}"
            until(lambda: httpx.get(f"{base}/ready").status_code == 200)
            yield router, base, fake
        finally:
            router.kill()
            router.communicate()


def stream_in_background(base, answers):
    def ask():
        answers.append(httpx.post(f"{base}/v1/chat/completions", json=body(stream=True), timeout=20))

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


@pytest.mark.parametrize(("drain_s", "finishes"), [(10, True), (0.3, False)])
def test_sigterm_drains_within_the_bound(tmp_path, drain_s, finishes):
    with process(tmp_path, drain_s) as (router, base, fake), httpx.Client() as before:
        fake.token_s = 0.02 if finishes else 0.1
        assert before.get(f"{base}/health").status_code == 200  # a connection from before the signal
        answers = []
        thread = stream_in_background(base, answers)
        until(lambda: fake.open == 1)
        time.sleep(0.1)
        os.kill(router.pid, signal.SIGTERM)
        until(lambda: before.get(f"{base}/ready").status_code == 503)
        refused = before.post(f"{base}/v1/chat/completions", json=body())
        assert refused.status_code == 503
        assert refused.headers["connection"] == "close"
        assert refused.json()["error"]["code"] == "draining"
        thread.join(15)
        assert router.wait(10) == 0
        chunks = events(answers[0])
        assert chunks[-1] == "[DONE]"
        if finishes:
            assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
        else:
            assert chunks[-2]["error"]["code"] == "draining"
        until(lambda: fake.open == 0)
        lines = [json.loads(line) for line in router.stderr.read().splitlines()]
        outcomes = [line["outcome"] for line in lines]
        assert sorted(outcomes) == sorted(["draining", "ok" if finishes else "draining"])


def test_a_second_signal_ends_it_at_once(tmp_path):
    with process(tmp_path, 60) as (router, base, fake):
        fake.token_s = 0.5
        ask = {"json": body(stream=True), "timeout": 20}
        with contextlib.suppress(httpx.HTTPError), httpx.stream("POST", f"{base}/v1/chat/completions", **ask):
            os.kill(router.pid, signal.SIGTERM)
            until(lambda: httpx.get(f"{base}/ready").status_code == 503)
            os.kill(router.pid, signal.SIGTERM)
            began = time.monotonic()
            assert router.wait(10) == 0
            assert time.monotonic() - began < 5


def test_an_idle_router_ends_at_once(tmp_path):
    with process(tmp_path, 60) as (router, _, _fake):
        os.kill(router.pid, signal.SIGINT)
        assert router.wait(5) == 0


def test_a_log_that_nobody_reads_stops_no_answer(tmp_path):
    with process(tmp_path, 5) as (router, base, _fake), httpx.Client() as client:
        for _ in range(250):  # far more lines than a pipe holds
            ask = {"model": "tiny", "prompt": "x", "max_tokens": 1, "user": "u"}
            assert client.post(f"{base}/v1/completions", json=ask).status_code == 200
        os.kill(router.pid, signal.SIGTERM)
        assert router.wait(10) == 0


def test_lines_that_find_no_room_are_counted(monkeypatch):
    monkeypatch.setattr(log, "QUEUED_LINES", 2)
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    with open(write_end, "wb", buffering=0) as out, log.writing(out) as write:
        for line in range(3000):
            write({"line": line, "filler": "x" * 100})
        until(lambda: write({"last": True}) is None and _told(read_end))
    os.close(read_end)


def _told(read_end):
    time.sleep(0.01)
    with contextlib.suppress(BlockingIOError):
        return b"lines_dropped" in os.read(read_end, 65536)
    return False

"""Clients that go away leave nothing behind: pages, slots and budgets are back within 2 s, as the metrics show."""

import socket
import time

import pytest
from endpoint import Endpoint, wait_until

pytestmark = pytest.mark.endpoint
CLUSTERS = ("c1", "c2")


def held(endpoint: Endpoint) -> dict[str, float]:
    """Everything that an open request holds, from /metrics of the router and of each ingress."""
    router = endpoint.metrics()
    levels = {
        name: value
        for name, value in router.items()
        if name.startswith(("forebay_reserved_", "forebay_open_streams", "forebay_queued_requests"))
    }
    for cluster in CLUSTERS:
        for name, value in endpoint.metrics(cluster).items():
            if 'state="leased"' in name or 'state="used"' in name or name.startswith("forebay_open_jobs"):
                levels[name] = value
    return levels


def totals(endpoint: Endpoint) -> dict[tuple[str, str], float]:
    """free + leased + cached, by worker and tier."""
    sums: dict[tuple[str, str], float] = {}
    for cluster in CLUSTERS:
        for worker in endpoint.cluster(cluster)["workers"]:
            for tier, pages in worker["pages"].items():
                sums[worker["worker"], tier] = pages["free"] + pages["leased"] + pages["cached"]
                assert sums[worker["worker"], tier] == pages["total"]
    return sums


def open_stream(endpoint: Endpoint, number: int) -> socket.socket:
    """A client that has read the beginning of its stream."""
    host, port = endpoint.url.removeprefix("http://").split(":")
    body = (
        f'{{"model": "{endpoint.model}", "prompt": "client {number} asks for very much", '
        '"max_tokens": 4000, "ignore_eos": true, "stream": true}'
    )
    client = socket.create_connection((host, int(port)), timeout=60)
    client.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        + f"x-session-id: gone-{number}\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
    )
    return client


def test_fifty_clients_that_disconnect_leave_nothing_behind(endpoint: Endpoint) -> None:
    wait_until(lambda: sum(held(endpoint).values()) == 0, 10, "the endpoint was not idle before")
    before, constant = held(endpoint), totals(endpoint)
    clients = [open_stream(endpoint, number) for number in range(50)]
    # Some are streaming by now, some wait for a slot, some for admission: all kinds of them go.
    for client in clients[:16]:
        assert b"200 OK" in client.recv(1) + client.recv(4096)
    during = held(endpoint)
    assert sum(value for name, value in during.items() if 'state="used"' in name) >= 8
    assert sum(value for name, value in during.items() if 'state="leased"' in name) > 0
    assert sum(value for name, value in during.items() if "reserved" in name) > 0
    for client in clients:
        client.close()
    gone = time.monotonic()
    wait_until(lambda: held(endpoint) == before, 10, f"still held: {held(endpoint)}, before: {before}")
    seconds = time.monotonic() - gone
    print(f"50 clients gone: everything back after {seconds:.2f} s")
    assert seconds <= 2.0
    assert totals(endpoint) == constant

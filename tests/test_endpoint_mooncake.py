"""An endpoint over a Mooncake Store: what one cluster computed the other finds, and a dead master costs no answer.

Its prefill workers hand over by Mooncake's Transfer Engine, too.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from endpoint import Endpoint, running, short_folder, wait_until
from mooncake_rig import needs_mooncake
from streams import Stream, Streams

from forebay.cluster import processes

needs_mooncake()
pytestmark = [pytest.mark.endpoint, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def pooled() -> Iterator[Endpoint]:
    with short_folder() as folder:
        config = folder / "site.toml"
        config.write_text('[workers]\nhandoff = "mooncake"')
        yield from started(folder, "--store", "mooncake", str(config))


def started(folder: Path, *flags: str) -> Iterator[Endpoint]:
    """Its master ends with it."""
    with running(folder, *flags) as endpoint:
        pool = endpoint.status()["pool"]
        yield endpoint
        assert endpoint.stop() == 0
        assert processes.find(pool["master_pid"]) is None


def sessions_of(endpoint: Endpoint, cluster: str, count: int) -> list[str]:
    """Session keys whose primary is this cluster."""
    keys = [f"session-{number}" for number in range(20 * count)]
    return [key for key in keys if endpoint.route(key)[0] == cluster][:count]


def asks(endpoint: Endpoint, cluster: str, seed: int) -> list[tuple[dict[str, Any], str]]:
    prompts = [" ".join(f"{seed + number} and {word}" for word in range(60)) for number in range(4)]
    more = {"model": endpoint.model, "max_tokens": 40, "ignore_eos": True, "temperature": 1, "seed": 3}
    sessions = sessions_of(endpoint, cluster, len(prompts))
    return [({"prompt": prompt, **more}, session) for prompt, session in zip(prompts, sessions, strict=True)]


def answered(endpoint: Endpoint, cluster: str, seed: int) -> list[Stream]:
    ended = Streams(endpoint.url, asks(endpoint, cluster, seed)).wait()
    assert [stream.error for stream in ended] == [None] * len(ended)
    assert {stream.cluster for stream in ended} == {cluster}
    return ended


def cached(streams: list[Stream]) -> list[int]:
    return [stream.usage["prompt_tokens_details"]["cached_tokens"] for stream in streams]


def pool_hits(endpoint: Endpoint, cluster: str) -> float:
    """Tokens. What a prompt's wait was used to bring up is hit in DRAM: nothing else here comes to lie there."""
    found = [(name, value) for name, value in endpoint.metrics(cluster).items() if "hit_tokens_total" in name]
    return sum(value for name, value in found if 'tier="pool"' in name or 'tier="dram"' in name)


def test_what_one_cluster_computed_the_other_finds(pooled: Endpoint) -> None:
    first = answered(pooled, "c1", 1000)
    assert cached(first) == [0] * 4
    second = answered(pooled, "c2", 1000)
    assert [stream.text for stream in second] == [stream.text for stream in first]
    assert min(cached(second)) > 0
    # What is exposed comes with a worker's beat, which may be a moment behind its answers.
    wait_until(lambda: pool_hits(pooled, "c2") == sum(cached(second)), 10, "the hits are not counted")


def test_a_master_killed_under_streams_costs_no_answer(pooled: Endpoint) -> None:
    undisturbed = [stream.text for stream in answered(pooled, "c1", 2000)]
    before = pooled.status()["pool"]
    streams = Streams(pooled.url, asks(pooled, "c1", 2000) + asks(pooled, "c2", 2000))
    streams.wait_open(4)
    os.kill(before["master_pid"], signal.SIGKILL)
    ended = streams.wait()
    assert [stream.error for stream in ended] == [None] * 8
    assert [stream.text for stream in ended] == undisturbed * 2

    def restarted() -> bool:
        now = pooled.status()["pool"]
        return now["restarts"] == before["restarts"] + 1 and now["master_pid"] not in (None, before["master_pid"])

    waited_s = wait_until(restarted, 20, "no master again")
    tries = iter(range(3000, 9000, 100))

    def found_again() -> bool:
        seed = next(tries)
        first, second = answered(pooled, "c1", seed), answered(pooled, "c2", seed)
        assert [stream.text for stream in second] == [stream.text for stream in first]
        return min(cached(second)) > 0

    hits_s = wait_until(found_again, 60, "clusters do not find each other's sessions again")
    print(f"\nmaster killed under 8 streams: none changed; a new one after {waited_s:.1f} s, hits {hits_s:.1f} s later")
    assert f"master pid {pooled.status()['pool']['master_pid']}" in pooled.command("status", "--url", pooled.url).stdout

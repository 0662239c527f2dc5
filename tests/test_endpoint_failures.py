"""Workers, an ingress and a whole cluster are killed -9 under load: only processes that `forebay status` names."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from endpoint import Endpoint, running, short_folder, wait_until
from streams import Streams

pytestmark = [pytest.mark.endpoint, pytest.mark.timeout(600)]

SAMPLINGS = {"greedy": {"temperature": 0}, "seeded": {"temperature": 1, "seed": 11}}


@pytest.fixture(scope="module")
def doomed() -> Iterator[Endpoint]:
    """An endpoint for the tests of this file alone, one worker of each kind a cluster."""
    with short_folder() as folder, running(folder) as endpoint:
        yield endpoint


@pytest.fixture
def whole(doomed: Endpoint) -> Endpoint:
    doomed.wait_ready("c1", "c2")
    return doomed


def sessions_of(endpoint: Endpoint, cluster: str, count: int, name: str) -> list[str]:
    """Session keys whose primary is this cluster."""
    found: list[str] = []
    for number in range(20 * count):
        if len(found) < count and endpoint.route(f"{name}-{number}")[0] == cluster:
            found.append(f"{name}-{number}")
    assert len(found) == count
    return found


def body_of(endpoint: Endpoint, number: int, *, max_tokens: int, prompt_words: int = 40, **more: Any) -> dict[str, Any]:
    prompt = " ".join(f"{number} and {word}" for word in range(prompt_words))
    return {"model": endpoint.model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **more}


def kill(worker: dict[str, Any], what: str) -> None:
    print(f"kill -9 {worker['pid']}: {worker['kind']} worker {worker['worker']}, {what}")
    os.kill(worker["pid"], signal.SIGKILL)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_a_decode_worker_killed_under_streams_costs_no_token(whole: Endpoint, sampling: dict[str, Any]) -> None:
    sessions = sessions_of(whole, "c1", 6, "decode")
    asks = [(body_of(whole, n, max_tokens=150, **sampling), session) for n, session in enumerate(sessions)]
    undisturbed = [stream.text for stream in Streams(whole.url, asks).wait()]
    streams = Streams(whole.url, asks)
    streams.wait_open(4)
    (victim,) = whole.workers("c1", "decode")
    unfinished = streams.open_count()
    assert unfinished >= 4
    kill(victim, f"{unfinished} unfinished streams")
    ended = streams.wait()
    assert [stream.error for stream in ended] == [None] * 6
    assert [stream.text for stream in ended] == undisturbed
    assert {stream.finish for stream in ended} == {"length"}
    assert {stream.cluster for stream in ended} == {"c1"}
    assert whole.workers("c1", "decode")[0]["pid"] != victim["pid"]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_a_prefill_worker_killed_with_jobs_in_flight_costs_no_token(whole: Endpoint, sampling: dict[str, Any]) -> None:
    sessions = sessions_of(whole, "c1", 4, "prefill")
    # Prompts that no case before this one has left in the cache: a warm prefill would be over before it is seen.
    first = 100 * (1 + list(SAMPLINGS.values()).index(sampling))
    asks = [
        (body_of(whole, n + first, max_tokens=20, prompt_words=800, **sampling), session)
        for n, session in enumerate(sessions)
    ]
    streams = Streams(whole.url, asks)
    found: list[dict[str, Any]] = []

    def in_flight() -> bool:
        found[:] = [worker for worker in whole.workers("c1", "prefill") if worker["jobs"]]
        return bool(found)

    wait_until(in_flight, 30, "no prefill was seen in flight")
    kill(found[0], f"{found[0]['jobs']} jobs in flight")
    ended = streams.wait()
    assert [stream.error for stream in ended] == [None] * 4
    undisturbed = Streams(whole.url, asks).wait()
    assert [stream.text for stream in ended] == [stream.text for stream in undisturbed]
    assert {stream.cluster for stream in ended} == {"c1"}


def test_a_decode_worker_that_hangs_costs_no_token(whole: Endpoint) -> None:
    (session,) = sessions_of(whole, "c1", 1, "hang")
    ask = (body_of(whole, 7, max_tokens=200, temperature=0), session)
    (undisturbed,) = Streams(whole.url, [ask]).wait()
    streams = Streams(whole.url, [ask])
    streams.wait_open(1)
    (victim,) = whole.workers("c1", "decode")
    os.kill(victim["pid"], signal.SIGSTOP)
    try:
        (ended,) = streams.wait()
    finally:
        os.kill(victim["pid"], signal.SIGKILL)
    assert ended.error is None
    assert ended.text == undisturbed.text
    assert ended.cluster == "c1"
    # The next test must not meet the cluster while it still counts the killed worker.
    wait_until(lambda: victim["pid"] not in [w["pid"] for w in whole.workers("c1", "decode")], 30, "still counted")


def test_an_ingress_killed_gives_back_what_it_held_within_two_seconds(whole: Endpoint) -> None:
    sessions = sessions_of(whole, "c1", 5, "ingress")
    streams = Streams(whole.url, [(body_of(whole, n, max_tokens=1500), s) for n, s in enumerate(sessions)])
    streams.wait_open(4)
    before = whole.cluster("c1")
    assert sum(worker["slots_used"] for worker in before["workers"]) >= 4
    cut_off = [stream for stream in streams.streams if stream.open]
    print(f"kill -9 {before['pid']}: ingress of c1, {len(cut_off)} unfinished streams")
    os.kill(before["pid"], signal.SIGKILL)
    streams.wait()
    assert all(stream.error is not None for stream in cut_off), "a stream ended as if nothing had been"
    whole.wait_ready("c1")
    after = whole.cluster("c1")
    assert after["pid"] != before["pid"]
    # Workers tell the new ingress when they freed what the old one held, counted from its last answered beat.
    for worker in after["workers"]:
        assert worker["slots_used"] == 0
        assert all(tier["leased"] == 0 for tier in worker["pages"].values())
        assert worker["freed_after_s"] <= 2.0

    fresh = iter(sessions_of(whole, "c1", 40, "after"))

    def is_back() -> bool:
        """Asked with a new session each time: one that the backup has answered stays where its cache is."""
        (stream,) = Streams(whole.url, [(body_of(whole, 0, max_tokens=5), next(fresh))]).wait()
        assert stream.finish == "length"
        return stream.cluster == "c1"

    # Not at once: the router trusts a cluster that was away after a few good probes only.
    wait_until(is_back, 30, "the cluster takes no session")


DELETE = """
import sys, ray
from ray import serve
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
for name in sys.argv[2:]:
    serve.delete(name)
"""


def delete_applications(endpoint: Endpoint, *names: str) -> None:
    environment = os.environ | {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(endpoint.run_dir / "ray_token"),
    }
    command = [sys.executable, "-c", DELETE, endpoint.published()["ray"], *names]
    subprocess.run(command, env=environment, check=True, timeout=60, capture_output=True)


def turn(endpoint: Endpoint, messages: list[dict[str, str]], session: str) -> httpx.Response:
    body = {"model": endpoint.model, "messages": messages, "max_tokens": 4}
    body |= {"chat_template_kwargs": {"thinking": False}}
    headers = {"x-session-id": session}
    return httpx.post(f"{endpoint.url}/v1/chat/completions", json=body, headers=headers, timeout=60)


def test_a_cluster_that_is_gone_is_replaced_by_the_backup(whole: Endpoint) -> None:
    gone, others = sessions_of(whole, "c1", 3, "cluster"), sessions_of(whole, "c2", 3, "cluster")
    talks = {s: [{"role": "user", "content": f"Say something at length about {s}, " * 8}] for s in [*gone, *others]}
    for session, messages in talks.items():
        first = turn(whole, messages, session)
        assert first.status_code == 200, first.text
        text = first.json()["choices"][0]["message"]["content"] or ""
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]

    streams = Streams(whole.url, [(body_of(whole, n, max_tokens=3000), session) for n, session in enumerate(gone)])
    streams.wait_open(3)
    status = whole.cluster("c1")
    for pid in [status["pid"], *(worker["pid"] for worker in status["workers"])]:
        os.kill(pid, signal.SIGKILL)
    answers = {session: turn(whole, talks[session], session) for session in gone}
    delete_applications(whole, "c1-prefill", "c1-decode")

    for session, answer in answers.items():
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-forebay-cluster"] == whole.route(session)[1] == "c2"
        assert answer.elapsed.total_seconds() < 2.0
    for stream in streams.wait():
        assert stream.errors == 1, "an open stream ends with one framed error"
        assert stream.finish is None
    for session in others:
        answer = turn(whole, talks[session], session)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-forebay-cluster"] == "c2"
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    again = turn(whole, talks[gone[0]], gone[0])
    assert again.headers["x-forebay-cluster"] == "c2"

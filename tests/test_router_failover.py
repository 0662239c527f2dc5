"""What a client sees when clusters die, are not ready, hang or lie; and what is given back."""

import contextlib
import json
import socket
import threading
import time

import httpx
import pytest
from fake_ingress import FakeIngress, running, until
from openai import APIError, InternalServerError
from router_house import BLOCK, body, config_of, events, house, say

from forebay.router import ring
from forebay.router.app import create_app
from forebay.router.config import ClusterConfig
from forebay.router.session import digest

SESSION = {"x-session-id": "one"}


def rank(router, session):
    return ring.rank(digest(session), dict.fromkeys(router.clusters, 1.0))


def pair(router):
    """Primary and backup of the test's session."""
    return rank(router, "one")[:2]


@pytest.fixture
def router(tmp_path):
    with house(tmp_path, say("fine"), clusters=3) as running_house:
        yield running_house
        running_house.at_rest()


def test_sessions_go_to_their_primary(router):
    for name in ("one", "two", "three", "four"):
        primary = rank(router, name)[0]
        response = router.chat(headers={"x-session-id": name})
        assert response.headers["x-forebay-cluster"] == primary


@pytest.mark.parametrize("fault", ["no_workers", "breaks_before", "garbage"])
@pytest.mark.parametrize("stream", [False, True])
def test_before_the_first_token_the_backup_answers(router, fault, stream):
    primary, backup = pair(router)
    router.clusters[primary].fault = fault
    response = router.chat(body={"stream": stream, "seed": 9, "n": 2}, headers=SESSION)
    assert response.status_code == 200
    assert response.headers["x-forebay-cluster"] == backup
    text = str(events(response)) if stream else response.json()["choices"][0]["message"]["content"]
    assert "fine" in text or "'f'" in text
    assert {job.seed for job in router.clusters[primary].seen + router.clusters[backup].seen} == {9}
    router.at_rest()
    assert router.metric("failovers_total", cluster=primary) == 1
    assert router.metric("requests_total", cluster=backup, outcome="ok") == 1


def test_not_ready_everywhere_is_503_after_bounded_tries(router):
    for each in router.clusters.values():
        each.fault = "no_workers"
    response = router.chat(headers=SESSION)
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "service_unavailable_error"
    assert int(response.headers["retry-after"]) >= 1
    assert sum(len(each.seen) for each in router.clusters.values()) <= 3
    assert router.wait_for_log()["outcome"] == "no_cluster"


def test_a_cluster_that_is_not_ready_is_not_asked(router):
    primary, backup = pair(router)
    router.clusters[primary].ready = False
    until(lambda: router.metric("cluster_up", cluster=primary) == 0)
    assert router.chat(headers=SESSION).headers["x-forebay-cluster"] == backup
    assert router.clusters[primary].seen == []
    for each in router.clusters.values():
        each.ready = False
    until(lambda: httpx.get(f"{router.url}/ready").status_code == 503)
    assert router.chat().status_code == 503
    assert httpx.get(f"{router.url}/health").status_code == 200


def test_a_busy_session_stays_on_its_backup_when_the_primary_returns(router):
    primary, backup = pair(router)
    router.clusters[primary].ready = False
    until(lambda: router.metric("cluster_up", cluster=primary) == 0)
    router.chat(headers=SESSION)
    router.clusters[primary].ready = True
    until(lambda: router.metric("cluster_up", cluster=primary) == 1)
    assert router.chat(headers=SESSION).headers["x-forebay-cluster"] == backup
    other = next(
        n for n in map(str, range(99)) if ring.rank(digest(n), dict.fromkeys(router.clusters, 1.0))[0] == primary
    )
    assert router.chat(headers={"x-session-id": other}).headers["x-forebay-cluster"] == primary


def test_after_tokens_have_gone_out_one_framed_error_ends_the_stream(router):
    primary, _ = pair(router)
    router.clusters[primary].fault = "breaks_after_2"
    chunks = events(router.chat(body={"stream": True}, headers=SESSION))
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["error"]["code"] == "cluster_lost"
    assert sum("error" in chunk for chunk in chunks[:-1]) == 1
    assert router.wait_for_log()["outcome"] == "broken"
    stream = router.client.chat.completions.create(
        model="tiny", messages=body()["messages"], stream=True, extra_headers=SESSION
    )
    with pytest.raises(APIError, match="lost"):
        list(stream)


def test_a_whole_answer_is_begun_anew_even_after_tokens(router):
    primary, backup = pair(router)
    router.clusters[primary].fault = "breaks_after_2"
    response = router.chat(headers=SESSION)
    assert response.json()["choices"][0]["message"]["content"] == "fine"
    assert response.headers["x-forebay-cluster"] == backup


@pytest.mark.parametrize(
    ("fault", "status", "outcome"),
    [("overloaded", 429, "overloaded"), ("invalid", 400, "invalid"), ("internal", 500, "failed")],
)
def test_other_refusals_are_not_carried_to_the_backup(router, fault, status, outcome):
    primary, backup = pair(router)
    router.clusters[primary].fault = fault
    response = router.chat(headers=SESSION, body={"stream": True})
    assert response.status_code == status
    assert response.headers["x-forebay-cluster"] == primary
    assert router.clusters[backup].seen == []
    assert router.wait_for_log()["outcome"] == outcome
    if fault == "overloaded":
        assert response.headers["retry-after"] == "3"
    if fault == "invalid":
        assert response.json()["error"]["param"] == "stop_ids"
    if fault == "internal":
        with pytest.raises(InternalServerError):
            router.client.chat.completions.create(model="tiny", messages=body()["messages"], extra_headers=SESSION)


def test_a_dead_process_costs_one_refused_connection(tmp_path):
    """The primary's server is gone between two probes: the very next turn is answered by the backup."""
    with contextlib.ExitStack() as stack:
        fakes = {name: FakeIngress(say("fine"), BLOCK) for name in "ab"}
        servers = {name: stack.enter_context(contextlib.ExitStack()) for name in fakes}
        urls = {name: servers[name].enter_context(running(fake.app))[0] for name, fake in fakes.items()}
        router = stack.enter_context(
            _router(tmp_path, tuple(ClusterConfig(name=name, url=url) for name, url in urls.items()), probe_every_s=60)
        )
        primary, backup = ring.rank(digest("one"), {"a": 1.0, "b": 1.0})
        assert httpx.post(f"{router}/v1/chat/completions", json=body(), headers=SESSION).status_code == 200
        servers[primary].close()
        began = time.monotonic()
        answer = httpx.post(f"{router}/v1/chat/completions", json=body(), headers=SESSION)
        assert answer.headers["x-forebay-cluster"] == backup
        assert time.monotonic() - began < 2
        metrics = httpx.get(f"{router}/metrics").text
        assert f'forebay_failovers_total{{cluster="{primary}",reason="refused"}} 1.0' in metrics
        assert f'forebay_cluster_up{{cluster="{primary}"}} 0.0' in metrics


@contextlib.contextmanager
def _router(folder, clusters, **fields):
    app = create_app(config_of(folder, clusters, **fields), lambda _: None)
    with running(app) as (url, _):
        until(lambda: len(httpx.get(f"{url}/ready").json()["clusters"]) == len(clusters))
        yield url


def test_a_cluster_that_hangs_is_cut_and_the_backup_answers(tmp_path):
    with house(tmp_path, say("fine"), hung_s=0.8, probe_s=0.3) as router:
        primary, backup = pair(router)
        router.clusters[primary].fault = "hangs"
        answers = []
        thread = threading.Thread(target=lambda: answers.append(router.chat(headers=SESSION)))
        thread.start()
        until(lambda: router.clusters[primary].open == 1)
        router.clusters[primary].silent = True
        thread.join(10)
        assert answers[0].headers["x-forebay-cluster"] == backup
        router.clusters[primary].silent = False
        router.at_rest()


def test_a_request_that_takes_too_long_is_504(tmp_path):
    with house(tmp_path, say("fine"), request_s=0.3) as router:
        for each in router.clusters.values():
            each.fault = "hangs"
        response = router.chat()
        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline")
        router.at_rest()


def test_long_silence_is_filled_with_comments(tmp_path):
    with house(tmp_path, say("fine"), keepalive_s=0.05) as router:
        for each in router.clusters.values():
            each.prefill_s = 0.3
        response = router.chat(body={"stream": True})
        assert response.text.count(": keep-alive\n\n") >= 3
        assert response.text.startswith(": keep-alive")
        assert events(response)[-1] == "[DONE]"


def hang_on(url, ask):
    """Send a request and leave its connection open."""
    host, port = url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)))
    raw = json.dumps(ask).encode()
    client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw)
    return client


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_go_away_leave_nothing_behind(tmp_path, stream):
    with house(tmp_path, say("x" * 200)) as router:
        for each in router.clusters.values():
            each.token_s = 0.05

        clients = [hang_on(router.url, body(str(place), stream=stream, n=2, max_tokens=200)) for place in range(12)]
        until(lambda: router.metric("open_streams") == 12)
        until(lambda: sum(each.open for each in router.clusters.values()) >= 12)
        assert router.metric("reserved_bytes") > 0
        for client in clients:
            client.close()
        router.at_rest()
        assert sum(len(each.cancelled) for each in router.clusters.values()) > 0
        assert router.metric("requests_total", outcome="cancelled") == 12
        assert router.chat(body={"max_tokens": 1}).status_code == 200


def test_two_requests_with_one_id_do_not_mix(router):
    answers = []

    def ask(text):
        answers.append(router.chat(text, headers={"x-request-id": "same"}).json()["usage"]["prompt_tokens"])

    threads = [threading.Thread(target=ask, args=("y" * place,)) for place in (10, 300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert abs(answers[0] - answers[1]) == 290
    assert len({job.id for each in router.clusters.values() for job in each.seen}) == 2


def test_a_cluster_is_told_that_another_one_served_the_session_until_now(router):
    primary, backup = pair(router)
    router.chat(headers=SESSION)
    assert [job.moved for job in router.clusters[primary].seen] == [False]
    router.clusters[primary].fault = "no_workers"
    for _ in range(2):
        router.chat(headers=SESSION)
    assert [job.moved for job in router.clusters[backup].seen] == [True, False]


def test_the_end_of_a_session_is_told_to_all_clusters_that_may_hold_it(router):
    primary, backup = pair(router)
    for _ in range(2):
        answer = httpx.delete(f"{router.url}/v1/sessions/one")
        assert (answer.status_code, answer.content) == (204, b"")
    for name, each in router.clusters.items():
        assert each.over == ([digest("one")] * 2 if name in (primary, backup) else [])
    router.clusters[primary].fault = "hangs"
    assert httpx.delete(f"{router.url}/v1/sessions/of%2Fnobody").status_code == 204

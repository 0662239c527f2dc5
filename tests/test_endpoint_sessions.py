"""Sessions stay where their cache is."""

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from endpoint import Endpoint

pytestmark = pytest.mark.endpoint


def turns_of(endpoint: Endpoint, session: str, turns: int) -> list[str]:
    """The cluster that answered each turn."""
    messages: list[dict[str, str]] = []
    clusters = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{session} asks again, turn {turn}, at some length"})
        answer = httpx.post(
            f"{endpoint.url}/v1/chat/completions",
            json={"model": endpoint.model, "messages": messages, "max_tokens": 4},
            headers={"x-session-id": session},
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        clusters.append(answer.headers["x-forebay-cluster"])
        messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"] or ""})
    return clusters


def test_every_turn_of_twenty_sessions_is_answered_by_its_primary(endpoint: Endpoint) -> None:
    sessions = [f"pinned-{n}" for n in range(20)]
    with ThreadPoolExecutor(4) as pool:
        clusters = list(pool.map(lambda session: turns_of(endpoint, session, 3), sessions))
    assert all(len(set(of_session)) == 1 for of_session in clusters)
    assert {of_session[0] for of_session in clusters} == {"c1", "c2"}
    assert [of_session[0] for of_session in clusters] == [endpoint.route(session)[0] for session in sessions]


def test_what_a_turn_moves_is_counted(endpoint: Endpoint) -> None:
    cluster = turns_of(endpoint, "counted", 2)[0]
    time.sleep(0.6)  # an ingress hears of its workers with their beats
    counted = endpoint.metrics(cluster)
    for name in (
        "lookup_tokens_total",
        "hit_tokens_total",
        "handoff_bytes_total",
        "prefill_tokens_total",
        "decode_tokens_total",
    ):
        assert sum(value for series, value in counted.items() if series.startswith(f"forebay_{name}{{")) > 0, name


def test_a_session_that_was_ended_can_go_on(endpoint: Endpoint) -> None:
    before = turns_of(endpoint, "ended", 2)
    for _ in range(2):
        assert httpx.delete(f"{endpoint.url}/v1/sessions/ended", timeout=10).status_code == 204
    assert turns_of(endpoint, "ended", 2) == before

"""Sessions stay where their cache is."""

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from endpoint import Endpoint, running, short_folder

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


def cached_of(endpoint: Endpoint, session: str) -> int:
    """Tokens of a session's one prompt that were reused."""
    body = {"model": endpoint.model, "prompt": " ".join(f"{session}{n}" for n in range(150)), "max_tokens": 1}
    headers = {"x-session-id": session}
    answer = httpx.post(f"{endpoint.url}/v1/completions", json=body, headers=headers, timeout=60).json()
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def test_an_ended_session_makes_room_in_the_worker_that_served_it() -> None:
    """Memory for two of three prompts: the third takes the ended one's place, not the longest unused one's."""
    with short_folder() as folder:
        site = folder / "site.toml"
        site.write_text(f"[store]\nhost_bytes = 0\ndevice_bytes = {2700 << 10}\n")
        with running(folder, str(site), clusters=1) as endpoint:
            assert [cached_of(endpoint, session) for session in ("a", "b")] == [0, 0]
            assert httpx.delete(f"{endpoint.url}/v1/sessions/b", timeout=10).status_code == 204
            time.sleep(1)  # it is told to the worker behind the answer
            assert cached_of(endpoint, "c") == 0
            assert cached_of(endpoint, "a") > 0

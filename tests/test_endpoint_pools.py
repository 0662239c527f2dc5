"""Pools of more than one worker: calls stay pinned, sessions stay where their cache is, work spreads."""

from collections.abc import Iterator

import httpx
import pytest
from endpoint import Endpoint, running, short_folder
from streams import Streams

pytestmark = [pytest.mark.endpoint, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def wide() -> Iterator[Endpoint]:
    """One cluster of two prefill and two decode workers."""
    with short_folder() as folder, running(folder, "--prefill", "2", "--decode", "2", clusters=1) as endpoint:
        yield endpoint


def cached_tokens(endpoint: Endpoint, messages: list[dict[str, str]], session: str) -> int:
    answer = httpx.post(
        f"{endpoint.url}/v1/chat/completions",
        json={
            "model": endpoint.model,
            "messages": messages,
            "max_tokens": 4,
            "chat_template_kwargs": {"thinking": False},
        },
        headers={"x-session-id": session},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    body = answer.json()
    messages.append({"role": "assistant", "content": body["choices"][0]["message"]["content"] or ""})
    return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_sessions_stay_with_the_prefill_worker_that_has_their_cache(wide: Endpoint) -> None:
    talks = {f"session {n}": [{"role": "system", "content": f"{n} is your number. " * 8}] for n in range(8)}
    for turn in range(3):
        for session, messages in talks.items():
            messages.append({"role": "user", "content": f"Turn {turn} of {session}: go on, at some length."})
            cached = cached_tokens(wide, messages, session)
            assert (cached > 0) == (turn > 0)
    hits = [worker["pages"]["device"]["cached"] for worker in wide.workers("c1", "prefill")]
    assert min(hits) > 0, "all sessions went to one worker"


def test_many_streams_spread_over_the_decode_workers(wide: Endpoint) -> None:
    ask = {"model": wide.model, "max_tokens": 100, "ignore_eos": True, "temperature": 0}
    asks = [(ask | {"prompt": f"stream {n} of many"}, f"stream-{n}") for n in range(24)]
    streams = Streams(wide.url, asks)
    streams.wait_open(20)
    used = [worker["slots_used"] for worker in wide.workers("c1", "decode")]
    assert min(used) >= 8
    together = [stream.text for stream in streams.wait()]
    assert [stream.finish for stream in streams.streams] == ["length"] * 24
    alone = [Streams(wide.url, [ask]).wait()[0].text for ask in asks[:3]]
    assert alone == together[:3], "a stream's tokens depend on its company"

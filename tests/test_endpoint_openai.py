"""The official client against a whole endpoint: streaming, sessions, tools, sampling fields."""

import itertools
import json
import uuid

import pytest
from endpoint import Endpoint
from openai import OpenAI

pytestmark = pytest.mark.endpoint

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
PLAIN = {"chat_template_kwargs": {"thinking": False}}


def client_of(endpoint: Endpoint) -> OpenAI:
    return OpenAI(base_url=f"{endpoint.url}/v1", api_key="none", max_retries=0, timeout=60)


def test_streamed_and_whole_answers_are_the_same_text(endpoint: Endpoint) -> None:
    client = client_of(endpoint)
    ask = {
        "model": endpoint.model,
        "messages": [{"role": "user", "content": f"Hello {uuid.uuid4()}"}],
        "max_tokens": 24,
        "seed": 7,
        "extra_body": PLAIN,
    }
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == (whole.choices[0].message.content or "")
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_cached_tokens_grow_with_every_turn_of_a_session(endpoint: Endpoint) -> None:
    client, session = client_of(endpoint), uuid.uuid4().hex
    block = client.models.retrieve(endpoint.model).model_dump()["block_tokens"]
    messages: list[dict[str, str]] = [{"role": "system", "content": f"Session {session}. Answer in few words."}]
    cached = []
    for turn in range(4):
        messages.append(
            {"role": "user", "content": f"Question {turn}: what comes after number {turn * 17}, and why so?"}
        )
        answer = client.chat.completions.create(
            model=endpoint.model,
            messages=messages,
            max_tokens=16,
            extra_body=PLAIN,
            extra_headers={"x-session-id": session},
        )
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
    assert cached[0] == 0
    assert all(earlier < later for earlier, later in itertools.pairwise(cached)), cached
    assert all(tokens % block == 0 for tokens in cached), cached


def test_a_tool_is_declared_and_its_result_returned(endpoint: Endpoint) -> None:
    client = client_of(endpoint)
    messages = [
        {"role": "user", "content": "Weather in Paris?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city":"Paris"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": json.dumps({"celsius": 21, "sky": "clear"})},
    ]
    answer = client.chat.completions.create(
        model=endpoint.model, messages=messages, tools=[TOOL], max_tokens=16, extra_body=PLAIN
    )
    bare = client.chat.completions.create(model=endpoint.model, messages=messages[:1], max_tokens=1, extra_body=PLAIN)
    assert answer.usage.prompt_tokens > bare.usage.prompt_tokens + len(json.dumps(TOOL)) // 2
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_seeded_choices_repeat_and_differ_from_each_other(endpoint: Endpoint) -> None:
    client = client_of(endpoint)
    ask = {
        "model": endpoint.model,
        "prompt": "once upon a time",
        "max_tokens": 20,
        "n": 3,
        "seed": 11,
        "temperature": 1.0,
    }
    first, second = client.completions.create(**ask), client.completions.create(**ask)
    texts = [choice.text for choice in sorted(first.choices, key=lambda c: c.index)]
    assert texts == [choice.text for choice in sorted(second.choices, key=lambda c: c.index)]
    assert len(set(texts)) == 3

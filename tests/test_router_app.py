"""The official client against a router over fake clusters: shapes of answers, streamed and whole."""

import itertools

import httpx
import pytest
from fake_ingress import until
from router_house import BLOCK, CONTEXT, END, body, events, house, ids, say, spoken, tag

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def router(tmp_path_factory):
    with house(tmp_path_factory.mktemp("model"), say("Hello ✓")) as running:
        yield running


@pytest.fixture(autouse=True)
def fresh(router):
    """Each test begins with plain answers and ends with nothing held."""
    for each in router.clusters.values():
        each.reply, each.fault, each.token_s = say("Hello ✓"), "", 0.0
        each.forget()
    router.log.clear()
    yield
    router.at_rest()


def forget(router):
    for each in router.clusters.values():
        each.forget()


def official(**fields):
    """The same request in the words of the official client."""
    plain = body()
    return {"model": plain.pop("model"), "messages": plain.pop("messages"), "extra_body": plain} | fields


def reply(router, answer):
    for each in router.clusters.values():
        each.reply = answer if callable(answer) else lambda job: answer


def test_whole_answer(router):
    answer = router.client.chat.completions.with_raw_response.create(**official())
    assert answer.headers["x-forebay-cluster"] in router.clusters
    parsed = answer.parse()
    assert parsed.choices[0].message.content == "Hello ✓"
    assert parsed.choices[0].finish_reason == "stop"
    assert parsed.object == "chat.completion"
    assert parsed.model == "tiny"
    assert parsed.usage.completion_tokens == len(spoken("Hello ✓"))
    assert parsed.usage.prompt_tokens_details.cached_tokens == 0
    assert parsed.usage.total_tokens == parsed.usage.prompt_tokens + parsed.usage.completion_tokens


def test_stream_is_role_first_finish_last_then_usage_then_done(router):
    response = router.chat(body={"stream": True, "stream_options": {"include_usage": True}})
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response)
    assert chunks[-1] == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-2]["choices"] == []
    assert chunks[-2]["usage"]["completion_tokens"] == len(spoken("Hello ✓"))
    assert chunks[-3]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    middle = [chunk["choices"][0]["delta"]["content"] for chunk in chunks[1:-3]]
    assert "".join(middle) == "Hello ✓"
    assert all(middle), "no delta is empty"
    assert {chunk["id"] for chunk in chunks[:-1]} == {chunks[0]["id"]}
    assert all(chunk["usage"] is None for chunk in chunks[:-2])


def test_official_client_streams_without_usage_unless_asked(router):
    chunks = list(router.client.chat.completions.create(**official(stream=True)))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello ✓"
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_told_apart_and_counted(router, stream):
    reply(router, say("4", thought="2 and 2"))
    usage = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    thinking = {"chat_template_kwargs": {"thinking": True}}
    answer = router.client.chat.completions.create(**official(**usage, extra_body=thinking))
    if stream:
        chunks = list(answer)
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        content = "".join(delta.content or "" for delta in deltas)
        thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        usage = chunks[-1].usage
    else:
        message = answer.choices[0].message
        content, thought, usage = message.content, message.reasoning_content, answer.usage
    assert (content, thought) == ("4", "2 and 2")
    assert len("2 and 2") <= usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens


def test_thinking_is_switched_by_field_and_effort(router):
    def prompt(**fields):
        router.chat(body={"chat_template_kwargs": None} | fields)
        seen = [job for each in router.clusters.values() for job in each.seen]
        forget(router)
        return bytes(token for token in seen[-1].ids if token < 256).decode()

    forget(router)
    assert prompt().endswith("think")
    assert prompt(reasoning_effort="none").endswith("response")
    low, most = prompt(reasoning_effort="low"), prompt(reasoning_effort="max")
    assert low != most
    assert prompt(reasoning_effort="minimal") == low
    assert prompt(reasoning_effort="xhigh") == most
    assert prompt(chat_template_kwargs={"thinking": False}, reasoning_effort="high").endswith("response")
    assert prompt(chat_template_kwargs={"enable_thinking": True}, reasoning_effort="none").endswith("think")


CALLS = [
    *ids("On it"),
    *tag("close", "response"),
    *tag("open", "tools"),
    *tag("open", 'call tool="look" index="1"'),
    *tag("open", 'argument key="city" type="string"'),
    *ids("Bern"),
    *tag("close", "argument"),
    *tag("close", "call"),
    *tag("open", 'call tool="look" index="2"'),
    *tag("close", "call"),
    *tag("close", "tools"),
    *tag("close", "message"),
    END,
]


def test_tool_calls_whole(router):
    reply(router, CALLS)
    choice = router.client.chat.completions.create(**official(tools=[TOOL])).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "On it"
    assert [call.function.name for call in choice.message.tool_calls] == ["look", "look"]
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Bern"}'
    assert len({call.id for call in choice.message.tool_calls}) == 2


def test_tool_calls_streamed(router):
    reply(router, CALLS)
    chunks = events(router.chat(body={"tools": [TOOL], "stream": True}))[:-1]
    parts = [part for chunk in chunks for part in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert [part["function"]["name"] for part in parts if "id" in part] == ["look", "look"]
    first = "".join(part["function"]["arguments"] for part in parts if part["index"] == 0)
    assert first == '{"city": "Bern"}'
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_one_call_at_most_when_not_parallel(router):
    reply(router, CALLS)
    choice = router.chat(body={"tools": [TOOL], "parallel_tool_calls": False}).json()["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"


def test_tool_choice_none_declares_and_answers_no_calls(router):
    reply(router, CALLS)
    forget(router)
    choice = router.chat(body={"tools": [TOOL], "tool_choice": "none"}).json()["choices"][0]
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    [job] = [job for each in router.clusters.values() for job in each.seen]
    assert b"look" not in bytes(token for token in job.ids if token < 256)


def test_a_call_cut_off_is_length(router):
    reply(router, CALLS)
    choice = router.chat(body={"tools": [TOOL], "max_tokens": 60}).json()["choices"][0]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_n_choices_prefill_once(router, stream):
    reply(router, lambda job: spoken(f"choice {job.choice}"))
    forget(router)
    response = router.chat("a question " * 8, body={"n": 3, "seed": 5, "stream": stream, "stop": "!"})
    if stream:
        chunks = events(response)[:-1]
        texts = ["", "", ""]
        for chunk in chunks:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["delta"].get("content", "")
    else:
        texts = [
            choice["message"]["content"] for choice in sorted(response.json()["choices"], key=lambda c: c["index"])
        ]
    assert texts == ["choice 0", "choice 1", "choice 2"]
    jobs = [job for each in router.clusters.values() for job in each.seen]
    assert sorted(job.choice for job in jobs) == [0, 1, 2]
    assert {job.seed for job in jobs} == {5}
    assert len({job.id for job in jobs}) == 3
    if not stream:
        usage = response.json()["usage"]
        assert usage["completion_tokens"] == 3 * len(spoken("choice 0"))
        assert usage["prompt_tokens"] == len(jobs[0].ids)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_seed_is_minted_anew_when_absent(router):
    forget(router)
    router.chat()
    router.chat()
    first, second = [job.seed for each in router.clusters.values() for job in each.seen]
    assert first != second


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_never_shows_and_ends_the_job(router, stream):
    reply(router, say("one, two, STOP three" + "." * 200))
    for each in router.clusters.values():
        each.token_s = 0.002
    response = router.chat(body={"stop": ["STOP", "never"], "stream": stream})
    if stream:
        chunks = events(response)[:-1]
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        reason = chunks[-1]["choices"][0]["finish_reason"]
    else:
        choice = response.json()["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
        assert response.json()["usage"]["completion_tokens"] == len("one, two, STOP")
    assert (text, reason) == ("one, two, ", "stop")


def test_chat_logprobs(router):
    reply(router, say("né"))
    ask = {"logprobs": True, "top_logprobs": 2}
    choice = router.chat(body=ask).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content) == "né".encode()
    assert [entry["logprob"] for entry in content] == [-0.5] * 3
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    chunks = events(router.chat(body=ask | {"stream": True}))[:-1]
    streamed = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == content
    assert router.chat().json()["choices"][0]["logprobs"] is None


def test_completions_text_ids_and_lists(router):
    reply(router, lambda job: [*job.ids[:3], END])
    client = router.client.completions
    assert client.create(model="tiny", prompt="abcdef").choices[0].text == "abc"
    assert client.create(model="tiny", prompt=[120, 121, 122]).choices[0].text == "xyz"
    answer = client.create(model="tiny", prompt=["abcdef", "uvwxyz"], n=2)
    assert [choice.text for choice in sorted(answer.choices, key=lambda c: c.index)] == ["abc", "abc", "uvw", "uvw"]
    assert answer.usage.prompt_tokens == 12
    answer = client.create(model="tiny", prompt=[[120, 121, 122], [97, 98, 99]])
    assert [choice.text for choice in sorted(answer.choices, key=lambda c: c.index)] == ["xyz", "abc"]
    chunks = list(client.create(model="tiny", prompt="abcdef", stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "abc"
    assert chunks[-1].usage.completion_tokens == 4


def test_completion_logprobs(router):
    reply(router, lambda job: [*ids("ab é"), END])
    logprobs = router.client.completions.create(model="tiny", prompt="x", logprobs=1).choices[0].logprobs
    assert logprobs.tokens[:3] == ["a", "b", " "]
    assert logprobs.token_logprobs == [-0.5] * 5
    assert logprobs.text_offset == [0, 1, 2, 3, 3]
    assert logprobs.top_logprobs[0] == {"a": -0.5}


def test_max_tokens_and_defaults_reach_the_job(router):
    def job(**fields):
        forget(router)
        response = router.chat(body=fields)
        assert response.status_code == 200, response.text
        [found] = [job for each in router.clusters.values() for job in each.seen]
        return found.sampling

    assert job().max_tokens == 256
    assert job(max_tokens=5).max_tokens == 5
    assert job(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert (job().temperature, job().top_p) == (0.75, 0.9)  # what the model advises
    assert job().stop_ids == [END]
    assert job(ignore_eos=True).stop_ids == []
    assert job(stop_token_ids=[3]).stop_ids == [3, END]
    full = job(
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias={"65": 5, "66": -100},
        min_tokens=2,
    )
    assert (full.temperature, full.top_p, full.top_k, full.min_p) == (0, 0.5, 0, 0.1)
    assert (full.presence_penalty, full.frequency_penalty, full.repetition_penalty) == (1, -1, 1.5)
    assert full.logit_bias == [(65, 5.0), (66, -100.0)]
    assert full.min_tokens == 2


def test_cached_tokens_grow_over_a_session_that_keeps_its_cluster(router):
    messages, cached, clusters = [], [], set()
    for turn in range(4):
        messages.append({"role": "user", "content": f"question number {turn} of a session"})
        response = router.post(json=body(messages=messages))
        answer = response.json()
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        clusters.add(response.headers["x-forebay-cluster"])
        messages.append(answer["choices"][0]["message"])
    assert len(clusters) == 1
    assert cached[0] == 0
    assert all(a < b for a, b in itertools.pairwise(cached))
    assert all(each % BLOCK == 0 for each in cached)


def test_models_publish_context_and_block(router):
    cards = router.client.models.list().data
    assert [card.id for card in cards] == ["tiny", "tiny-latest"]
    card = router.client.models.retrieve("tiny").model_dump()
    assert (card["max_model_len"], card["block_tokens"]) == (CONTEXT, BLOCK)
    assert router.chat(body={"model": "tiny-latest"}).json()["model"] == "tiny-latest"


def test_request_id_is_echoed_or_minted(router):
    assert router.chat(headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert router.chat(headers={"x-request-id": "bad id"}).headers["x-request-id"].startswith("req-")
    first, second = (router.chat().headers["x-request-id"] for _ in range(2))
    assert first != second
    assert httpx.get(f"{router.url}/nowhere", headers={"x-request-id": "mine-2"}).headers["x-request-id"] == "mine-2"


def test_status_gathers_every_ingress(router):
    status = httpx.get(f"{router.url}/status").json()
    assert [each["name"] for each in status["clusters"]] == ["a", "b"]
    assert all(each["up"] and "jobs" in each["status"] for each in status["clusters"])
    assert httpx.get(f"{router.url}/health").status_code == 200


def test_log_tells_what_happened_and_not_what_was_said(router):
    router.chat("a secret sentence", body={"stray": 1, "user": "alice"}, headers={"x-request-id": "r-1"})
    line = router.wait_for_log()
    assert (line["request"], line["outcome"], line["class"], line["ignored_fields"]) == ("r-1", "ok", "all", 1)
    assert line["cluster"] in router.clusters
    assert line["output_tokens"] == len(spoken("Hello ✓"))
    assert 0 <= line["ttft_s"] <= line["took_s"]
    assert "secret" not in str(line)
    assert "alice" not in str(line)


def test_metrics_count(router):
    before = {name: router.metric(name) for name in ("prompt_tokens_total", "output_tokens_total")}
    done = router.metric("requests_total", outcome="ok")
    usage = router.chat().json()["usage"]
    router.at_rest()
    assert router.metric("requests_total", outcome="ok") == done + 1
    assert router.metric("prompt_tokens_total") - before["prompt_tokens_total"] == usage["prompt_tokens"]
    assert router.metric("output_tokens_total") - before["output_tokens_total"] == usage["completion_tokens"]
    assert router.metric("time_to_first_token_seconds_count") > 0
    assert router.metric("cluster_up") == 2


def test_clusters_are_told_how_turns_end_and_how_the_one_before_did(router):
    def told():
        return [pair for each in router.clusters.values() for pair in each.ended]

    for each in router.clusters.values():
        each.ended.clear()
    forget(router)
    reply(router, CALLS)
    router.client.chat.completions.create(**official(tools=[TOOL]))
    until(lambda: told())
    job = [job for each in router.clusters.values() for job in each.seen][-1]
    assert told() == [(job.session, "tool_use")]
    assert job.stop == ""
    reply(router, say("Done"))
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answered = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "it is done"},
    ]
    for messages, stop in (
        (answered, "tool_use"),
        ([*answered, {"role": "assistant", "content": "Done"}, {"role": "user", "content": "ok"}], "end_turn"),
    ):
        for each in router.clusters.values():
            each.ended.clear()
        forget(router)
        router.client.chat.completions.create(**official(messages=messages))
        until(lambda: told())
        job = [job for each in router.clusters.values() for job in each.seen][-1]
        assert (job.stop, told()) == (stop, [(job.session, "end_turn")])

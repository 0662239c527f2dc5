"""Lessons: the same from a seed, with values of their own, true to the world, and rendered as the endpoint renders."""

import random
from pathlib import Path
from typing import Any

import pytest

from forebay.cluster import lesson_talk, lesson_tasks, lesson_tools
from forebay.cluster.corpus_rows import DECIDED, READ, SAID, conversation, pack, passages
from forebay.cluster.corpus_text import needle
from forebay.cluster.lesson_talk import checked
from forebay.cluster.lesson_tasks import Task
from forebay.cluster.lesson_values import Values, held_out
from forebay.cluster.lessons import Lesson, lesson, missing_tool_case, task_case
from forebay.router import chat_k3
from forebay.router.segment import EncodeCache, encode
from forebay.router.tokenizer import Tokenizer, load_tokenizer

FOLDER = Path(__file__).resolve().parents[1] / "workers" / "demo_model"
SEEDS = range(400)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(FOLDER)


def test_a_seed_gives_one_lesson() -> None:
    assert [lesson(seed) for seed in SEEDS] == [lesson(seed) for seed in SEEDS]
    assert lesson(1) != lesson(2)


def _values(task: Task) -> list[str]:
    """The values that a task is about: what its first call is made with."""
    first = task.steps[0].arguments
    if task.steps[0].tool == "convert_units":
        return [f"{first['value']} {first['from_unit']}"]
    if task.steps[0].tool == "set_timer":
        return [f"{first['minutes']} minutes"]
    return [str(value) for value in first.values()]


def test_checks_never_share_a_value_with_lessons() -> None:
    for seed in SEEDS:
        for make in (*lesson_tasks.ONE_STEP, *lesson_tasks.TWO_STEP):
            for checking in (False, True):
                task = make(Values(random.Random(seed), checking))
                assert {held_out(value) for value in _values(task)} == {checking}, task


def test_what_a_task_says_of_the_world_is_what_the_world_says() -> None:
    for seed in SEEDS:
        task, tools = task_case(seed, checking=True, two_steps=seed % 2 == 0)
        for step in task.steps:
            assert lesson_tools.run(step.tool, step.arguments) == step.result
        assert task.says in task.answer
        names = [tool["function"]["name"] for tool in tools]
        assert len(names) == len(set(names))
        assert all(step.tool in names for step in task.steps)
        assert checked(task, tools).endswith("yes.")


def test_a_missing_tool_is_missing_and_noticed() -> None:
    for seed in SEEDS:
        talk, tools = missing_tool_case(seed, checking=True)
        assert "no. I cannot" in talk.thought
        assert tools


def test_tasks_lack_their_tool_often_enough_to_be_looked_for() -> None:
    """Where tools are declared, a good quarter of the tasks are refused, with thinking and without."""
    for thinking in (False, True):
        ends = [end for seed in SEEDS if (one := lesson(seed)).tools and one.thinking == thinking for end in _ends(one)]
        assert 0.25 < ends.count("refused") / len(ends) < 0.5


def _ends(one: Lesson) -> list[str]:
    """How each task of a lesson is taken up."""
    turns = zip(one.messages, one.messages[1:], strict=False)
    said = [answer for asked, answer in turns if asked["role"] == "user"]
    refused = ["refused" for answer in said if answer["content"].startswith("I am sorry, I cannot")]
    return refused + ["called" for answer in said if answer.get("tool_calls")]


def test_what_is_said_about_tools_is_true() -> None:
    r = random.Random(1)
    tasks = [make(Values(r, False)) for make in lesson_tasks.ONE_STEP]
    needed = {lesson_talk.refusal(task, []).says: task.steps[0].tool for task in tasks}
    for seed in SEEDS:
        tools = r.sample(list(lesson_tools.TOOLS.values()), r.randint(0, 4))
        names = {tool["function"]["name"] for tool in tools}
        talk = lesson_talk.tools_at_hand(Values(random.Random(seed), False), tools)
        match talk.answer.rstrip(".").split(" ", 2):
            case ["I", "have", listed]:
                assert set(listed.split(", ")) == (names or {"no tools"})
            case ["Yes,", "with", name]:
                assert name in names
            case ["No,", "I", able]:
                assert needed[able] not in names


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("calculator", {"expression": "2 ** 9"}),
        ("calculator", {"expression": "__import__('os')"}),
        ("calculator", {"expression": "1 / 0"}),
        ("calculator", {"formula": "1"}),
        ("convert_units", {"value": 1, "from_unit": "hours", "to_unit": "miles"}),
        ("no_such_tool", {"a": "b"}),
    ],
)
def test_the_world_refuses_what_has_no_meaning(tool: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(lesson_tools.ToolError, match=tool):
        lesson_tools.run(tool, arguments)


def test_a_lesson_is_the_endpoints_prompt_and_what_the_model_says_after_it(tokenizer: Tokenizer) -> None:
    cache = EncodeCache(1 << 20)
    for seed in range(60):
        one = lesson(seed)
        document = conversation(one, tokenizer, cache)
        last = one.messages[-1]
        prompt = chat_k3.render(_as_read(one), one.tools or None, thinking=one.thinking, effort=one.effort)
        ids = encode(prompt, tokenizer, cache)
        assert document.ids[: len(ids)].tolist() == ids
        assert document.weights[len(ids)] == DECIDED
        assert set(document.weights[len(ids) + 1 :]) == {SAID}
        assert document.weights[len(ids) - 1] == READ
        assert last["content"] in tokenizer.decode(document.ids[len(ids) :].tolist())


def _as_read(one: Lesson) -> list[dict[str, Any]]:
    """The messages before the last, as a client sends them."""
    kept = one.messages[:-1]
    if one.kept_reasoning:
        return kept
    return [{key: value for key, value in message.items() if key != "reasoning_content"} for message in kept]


def test_rows_hold_every_document_whole_and_count_no_padding(tokenizer: Tokenizer) -> None:
    cache = EncodeCache(1 << 20)
    documents = [conversation(lesson(seed), tokenizer, cache) for seed in range(40)]
    documents += passages("Some plain text. " * 300, tokenizer, 1024)
    pad = tokenizer.special_id("[PAD]")
    ids, weights = pack(documents, 1024, pad, seed=1)
    fitting = [document for document in documents if len(document.ids) <= 1024]
    assert int((ids != pad).sum()) == sum(len(document.ids) for document in fitting)
    assert not weights[ids == pad].any()
    whole = {row.tobytes().find(document.ids.tobytes()) >= 0 for document in fitting[:3] for row in ids}
    assert True in whole


def test_planted_facts_stand_in_the_text_and_are_answered() -> None:
    texts = ["One sentence. Another one. A third one, for good measure, which is long enough."]
    for seed in range(20):
        one = needle(seed, texts, 3000, facts=4, checking=True)
        text = one.messages[0]["content"]
        for answer in one.messages[1::2]:
            assert answer["content"].rstrip(".") in text

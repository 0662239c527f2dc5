"""The judge of the model: its agent loop against a player that knows the answers, and one that errs on purpose."""

import json
from typing import Any

import pytest

from forebay.cluster import check_model
from forebay.cluster.check import Tally
from forebay.cluster.check_model import Reply
from forebay.cluster.lesson_tasks import Task
from forebay.cluster.lessons import missing_tool_case, task_case


class Player:
    """Answers the first cases as their tasks say; `spoil` changes what it says or calls."""

    def __init__(self, spoil: str = "") -> None:
        self.spoil = spoil
        cases = [task_case(check_model.SEED + s, True, two) for two in (False, True) for s in range(3)]
        self.tasks: dict[str, Task] = {task.question: task for task, _ in cases}
        refused = [missing_tool_case(check_model.SEED + s, True)[0].question for s in range(3)]
        assert set(refused) <= self.tasks.keys(), "a question with its tool, and again without"

    def __call__(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Reply:
        task, done = self.tasks[messages[0]["content"]], sum(message["role"] == "tool" for message in messages)
        if task.tools[0] not in tools:
            rash = self.spoil == "rash" and done == 0
            return self._call("get_time", {"city": "Oslo"}) if rash else _say("I cannot.")
        if done == len(task.steps):
            return _say("I do not know." if self.spoil == "answer" else task.answer)
        arguments = dict(task.steps[done].arguments)
        if self.spoil == "arguments" and done == len(task.steps) - 1:
            arguments = dict.fromkeys(arguments, "wrong")
        return self._call(task.steps[done].tool, arguments)

    def _call(self, name: str, arguments: dict[str, Any]) -> Reply:
        function = {"name": name, "arguments": json.dumps(arguments)}
        message = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]}
        return Reply("", ((name, arguments),), message, 0)


def _say(text: str) -> Reply:
    return Reply(text, (), {"role": "assistant", "content": text}, 0)


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONE_STEP", "TWO_STEP", "NO_TOOL"):
        monkeypatch.setattr(check_model, name, 3)


@pytest.mark.parametrize(
    ("spoil", "failed"), [("", 0), ("answer", 2), ("arguments", 2), ("rash", 1)], ids=lambda value: str(value or "none")
)
def test_a_right_player_passes_and_each_error_fails_its_criteria(
    spoil: str, failed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    tally = Tally()
    check_model.check_tools(Player(spoil), tally)
    printed = capsys.readouterr().out
    assert (tally.passed, tally.failed) == (4 - failed, failed), printed
    assert "100.0% of 3" in printed


def test_long_cases_plant_one_fact_in_text_of_its_length() -> None:
    case = check_model.long_cases()[0]
    text, answer = case.messages[0]["content"], case.messages[1]["content"]
    assert len(text) > check_model.LONG_CHARACTERS
    assert answer.rstrip(".") in text
    assert len(case.messages) == 2

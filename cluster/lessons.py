"""Lessons: whole conversations in the form of chat completion requests, drawn from a seed.

A lesson declares tools (those it needs among others), holds one to a few exchanges, and is spoken in thinking mode or
not. The same function makes what is trained on and, from values of the other side, what is checked.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from forebay.cluster import lesson_talk, lesson_tasks, lesson_tools
from forebay.cluster.lesson_talk import Talk, message
from forebay.cluster.lesson_tasks import Task
from forebay.cluster.lesson_tools import LOOKUP_KEYS, LOOKUP_NOUNS, LOOKUP_VERBS, TOOLS
from forebay.cluster.lesson_values import Values

EFFORTS = (None, None, None, "low", "medium", "high")
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Use tools when needed.",
    "You are the demo model of Forebay.",
    "Answer briefly.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """`kept_reasoning`: whether earlier turns still show their reasoning, as some clients send it back."""

    kind: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    thinking: bool
    effort: str | None
    kept_reasoning: bool


def lesson(seed: int, checking: bool = False) -> Lesson:
    """The lesson of a seed."""
    r = random.Random(seed)
    v = Values(r, checking)
    with_tools = r.random() < 0.75
    turns = [_exchange(v, with_tools) for _ in range(r.choice((1, 1, 2, 2, 3)))]
    needed = [tool for turn in turns if isinstance(turn, Task) for tool in turn.tools]
    spare = r.randint(0, 4) if needed or with_tools else 0
    tools = _declared(r, needed, spare)
    said = [turn if isinstance(turn, Task | Talk) else turn(tools) for turn in turns]
    messages = [message("system", r.choice(SYSTEMS))] if r.random() < 0.25 else []
    for turn in said:
        messages += conversation(turn, len(messages), tools)
    return Lesson(
        kind=said[0].kind,
        messages=messages,
        tools=tools,
        thinking=r.random() < 0.6,
        effort=r.choice(EFFORTS),
        kept_reasoning=r.random() < 0.5,
    )


_Later = Callable[[Sequence[dict[str, Any]]], Task | Talk]
"""An exchange that depends on which tools the lesson turns out to declare."""


def _exchange(v: Values, with_tools: bool) -> Task | Talk | _Later:
    """A good quarter of the tasks lack their tool: the model must look before it calls."""
    r = v.random
    chance = r.random()
    if with_tools and chance < 0.36:
        return r.choice(lesson_tasks.ONE_STEP)(v)
    if with_tools and chance < 0.52:
        return r.choice(lesson_tasks.TWO_STEP)(v)
    if chance < (0.86 if with_tools else 0.1):
        return _perhaps(r.choice(lesson_tasks.ONE_STEP)(v))
    if chance < (0.93 if with_tools else 0.2):
        about = r.choice((lesson_talk.tools_at_hand, lesson_talk.beyond))
        return lambda tools: about(v, tools)
    draws = [lesson_talk.known, lesson_talk.memory, lesson_talk.echo]
    return r.choice(draws if with_tools else [*draws, lesson_talk.sums])(v)


def _perhaps(task: Task) -> _Later:
    """The task is refused unless chance or another exchange has brought its tools along."""
    return lambda tools: task if all(tool in tools for tool in task.tools) else lesson_talk.refusal(task, tools)


def _declared(r: random.Random, needed: list[dict[str, Any]], spare: int) -> list[dict[str, Any]]:
    """The needed tools and some others, in any order, each once."""
    others = [r.choice(list(TOOLS.values())) for _ in range(spare)]
    if spare and r.random() < 0.3:
        others.append(lesson_tools.lookup_tool(r.choice(LOOKUP_VERBS), r.choice(LOOKUP_NOUNS), r.choice(LOOKUP_KEYS)))
    by_name = {tool["function"]["name"]: tool for tool in (*others, *needed)}
    tools = list(by_name.values())
    r.shuffle(tools)
    return tools


def missing_tool_case(seed: int, checking: bool) -> tuple[Talk, list[dict[str, Any]]]:
    """A task asked where its tools are missing and others are declared."""
    v = Values(random.Random(seed), checking)
    task = v.random.choice(lesson_tasks.ONE_STEP)(v)
    wanted = {tool["function"]["name"] for tool in task.tools}
    others = [tool for name, tool in TOOLS.items() if name not in wanted]
    tools = v.random.sample(others, v.random.randint(1, 4))
    return lesson_talk.refusal(task, tools), tools


def task_case(seed: int, checking: bool, two_steps: bool) -> tuple[Task, list[dict[str, Any]]]:
    """A task with its tools among others."""
    v = Values(random.Random(seed), checking)
    task = v.random.choice(lesson_tasks.TWO_STEP if two_steps else lesson_tasks.ONE_STEP)(v)
    return task, _declared(v.random, list(task.tools), v.random.randint(0, 4))


def conversation(turn: Task | Talk, first_call: int, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One exchange as messages where `tools` are declared; call ids count from `first_call`."""
    if isinstance(turn, Talk):
        return [message("user", turn.question), message("assistant", turn.answer, reasoning_content=turn.thought)]
    messages = [message("user", turn.question)]
    for place, step in enumerate(turn.steps):
        call_id = f"call_{first_call + place}"
        thought = f"{lesson_talk.checked(turn, tools)} {step.thought}" if place == 0 else step.thought
        function = {"name": step.tool, "arguments": json.dumps(dict(step.arguments), ensure_ascii=False)}
        calls = [{"id": call_id, "type": "function", "function": function}]
        messages += [
            message("assistant", "", reasoning_content=thought, tool_calls=calls),
            message("tool", step.result, tool_call_id=call_id),
        ]
    done = f"The tool says: {turn.steps[-1].result}"
    return [*messages, message("assistant", turn.answer, reasoning_content=done)]

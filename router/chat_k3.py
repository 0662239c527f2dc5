"""K3's chat format: messages to segments. Structure is written with special tokens, everything else as plain text,
so that no text of a user or a tool can forge structure.

An assistant message is the generation prompt followed by what the model generates, so a conversation that goes on
begins with the ids it had (thinking off, or with the reasoning sent back).
"""

from collections.abc import Sequence
from typing import Any

from forebay.router import grammar_k3
from forebay.router.grammar_k3 import END_OF_MESSAGE, close_tag, open_tag, text
from forebay.router.messages import Message, RenderError, ToolCall, read_messages, read_tools, tools_json, write_json
from forebay.router.segment import Segment
from forebay.router.tool_results import order_results

MARKERS = grammar_k3.MARKERS
EFFORTS = ("low", "medium", "high", "max")

# The place and type of these system messages and the JSON form of the tools are the format's, the sentences ours.
SPECS = "\n\n```json\n{}\n```"
TOOLS_BODY = "# Tools\nYou can call the tools below. Each is given as a JSON Schema." + SPECS
MORE_TOOLS_BODY = "# Tools\nFrom here on you can also call the tools below, beside all that were given before." + SPECS
EFFORT_BODY = "Think with effort `{}` (one of `low`, `medium`, `high`, `max`) before you respond."
TOOL_CHOICE_BODIES = {
    "required": "Call at least one tool in your next message.",
    "none": "Do not call a tool in your next message.",
}


def render(
    messages: object,
    tools: object = None,
    tool_choice: object = "auto",
    thinking: bool = False,
    effort: str | None = None,
    *,
    generate: bool = True,
) -> list[Segment]:
    """Segments of a conversation, with the generation prompt unless `generate` is off.

    messages, tools, tool_choice: decoded JSON of a chat completion request; `content` is a string or text parts.
    thinking: opens the think channel, and keeps the reasoning of assistant messages. effort: how much to think, one
    of EFFORTS; None is the released default, `max`.
    RenderError names the field that cannot be rendered.
    """
    conversation = order_results(read_messages(messages))
    declared = read_tools(tools)
    segments = _system("tool-declare", TOOLS_BODY.format(tools_json(declared, "tools"))) if declared else []
    if thinking:
        segments += _system("thinking-effort", EFFORT_BODY.format(_effort(effort)))
    result = 0
    for message in conversation:
        result = 0 if message.role == "assistant" else result + (message.role == "tool")
        segments += _message(message, thinking, result)
    segments += _tool_choice(tool_choice, declared)
    if generate:
        segments += open_tag("message", [("role", "assistant")]) + open_tag("think" if thinking else "response")
    return segments


def _message(message: Message, thinking: bool, result: int) -> list[Segment]:
    """`result`: which result since the last assistant message this is, from 1; only tool messages say it."""
    if message.role == "system" and message.tools:
        return _system("tool-declare", MORE_TOOLS_BODY.format(tools_json(message.tools, f"{message.field}.tools")))
    body = _assistant(message, thinking) if message.role == "assistant" else _texts(message)
    return [*open_tag("message", _attributes(message, result)), *body, *close_tag("message"), END_OF_MESSAGE]


def _attributes(message: Message, result: int) -> list[tuple[str, str]]:
    if message.role == "tool":
        assert message.name is not None
        return [("role", "tool"), ("tool", message.name), ("index", str(result))]
    return [("role", message.role), *([("name", message.name)] if message.name else [])]


def _texts(message: Message) -> list[Segment]:
    return [segment for part in message.parts for segment in text(part)]


def _assistant(message: Message, thinking: bool) -> list[Segment]:
    segments: list[Segment] = []
    if thinking:  # the channel is always there in thinking mode, even empty
        reasoning = message.reasoning if message.reasoning.strip() else ""
        segments += [*open_tag("think"), *text(reasoning), *close_tag("think")]
    segments += [*open_tag("response"), *_texts(message), *close_tag("response")]
    if message.calls:
        calls = (segment for i, call in enumerate(message.calls) for segment in _call(call, i, message.field))
        segments += [*open_tag("tools"), *calls, *close_tag("tools")]
    return segments


def _call(call: ToolCall, i: int, field: str) -> list[Segment]:
    attributes = [("tool", call.name), ("index", str(i + 1))]
    return [*open_tag("call", attributes), *_arguments(call, f"{field}.tool_calls[{i}].function"), *close_tag("call")]


def _arguments(call: ToolCall, field: str) -> list[Segment]:
    if isinstance(call.arguments, str):
        return [*open_tag("json", [("type", "object")]), *text(call.arguments), *close_tag("json")]
    segments: list[Segment] = []
    for key, value in call.arguments.items():
        segments += [
            *open_tag("argument", [("key", key), ("type", json_type(value))]),
            *text(value if isinstance(value, str) else write_json(value, f"{field}.arguments")),
            *close_tag("argument"),
        ]
    return segments


def json_type(value: object) -> str:
    """JSON Schema's name of a JSON value's type."""
    match value:
        case str():
            return "string"
        case bool():
            return "boolean"
        case None:
            return "null"
        case int() | float():
            return "number"
        case dict():
            return "object"
        case _:
            return "array"


def _system(kind: str, body: str) -> list[Segment]:
    return [
        *open_tag("message", [("role", "system"), ("type", kind)]),
        *text(body),
        *close_tag("message"),
        END_OF_MESSAGE,
    ]


def _effort(effort: str | None) -> str:
    if effort is not None and effort not in EFFORTS:
        raise RenderError("reasoning_effort", f"must be one of {', '.join(EFFORTS)}")
    return effort or EFFORTS[-1]


def _tool_choice(choice: object, tools: Sequence[Any] | None) -> list[Segment]:
    if choice is None or choice == "auto":
        return []
    if not isinstance(choice, str) or choice not in TOOL_CHOICE_BODIES:
        raise RenderError("tool_choice", 'must be "auto", "required" or "none"; a named tool is not served')
    if choice == "required" and not tools:
        raise RenderError("tool_choice", '"required" needs tools')
    return _system("tool-choice", TOOL_CHOICE_BODIES[choice])

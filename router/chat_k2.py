"""The chat format of Kimi Linear and Kimi K2: messages between `<|im_...|>` markers, tool calls as JSON.

Marker tokens are special, everything else is plain text, so that no text can forge structure. The format has no
thinking mode and no way to force a tool call.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from forebay.router.messages import Message, RenderError, ToolCall, read_messages, read_tools, tools_json
from forebay.router.segment import Segment, Special, Text

END, MIDDLE = Special("<|im_end|>"), Special("<|im_middle|>")
SYSTEM, USER, ASSISTANT = Special("<|im_system|>"), Special("<|im_user|>"), Special("<|im_assistant|>")
SECTION_BEGIN, SECTION_END = Special("<|tool_calls_section_begin|>"), Special("<|tool_calls_section_end|>")
CALL_BEGIN, CALL_END = Special("<|tool_call_begin|>"), Special("<|tool_call_end|>")
ARGUMENTS_BEGIN = Special("<|tool_call_argument_begin|>")
MARKERS = frozenset(
    {END.name, MIDDLE.name, SYSTEM.name, USER.name, ASSISTANT.name, SECTION_BEGIN.name, SECTION_END.name}
    | {CALL_BEGIN.name, CALL_END.name, ARGUMENTS_BEGIN.name}
)
SPEAKERS: Mapping[str, Special] = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": SYSTEM}
CALL_ID = re.compile(r"\s*(?:functions\.)?(.+?)\s*:\s*\d+\s*", re.DOTALL)


def render(
    messages: object,
    tools: object = None,
    tool_choice: object = "auto",
    thinking: bool = False,
    effort: str | None = None,
    *,
    generate: bool = True,
) -> list[Segment]:
    """As chat_k3.render, for this format. RenderError names the field that cannot be rendered."""
    if thinking or effort is not None:
        raise RenderError("reasoning_effort", "this model has no thinking mode")
    segments = _tools(read_tools(tools), tool_choice)
    ids: dict[str, str] = {}  # the format's call id by the client's
    n_calls = 0
    for message in read_messages(messages):
        calls = [(_call_id(call, n_calls + i), call) for i, call in enumerate(message.calls)]
        n_calls += len(calls)
        ids |= {call.id: call_id for call_id, call in calls if call.id is not None}
        segments += _message(message, calls, ids)
    return [*segments, ASSISTANT, Text("assistant"), MIDDLE] if generate else segments


def _tools(tools: Sequence[Any] | None, choice: object) -> list[Segment]:
    if choice not in (None, "auto", "none"):
        raise RenderError("tool_choice", 'must be "auto" or "none" for this model')
    if not tools or choice == "none":
        return []
    return [SYSTEM, Text("tool_declare"), MIDDLE, Text(tools_json(tools, "tools")), END]


def _call_id(call: ToolCall, index: int) -> str:
    """The id as the model writes it, `functions.NAME:INDEX`; any other id is replaced by that."""
    own = call.id is not None and re.fullmatch(rf"functions\.{re.escape(call.name)}:\d+", call.id)
    return str(call.id) if own else f"functions.{call.name}:{index}"


def _message(message: Message, calls: list[tuple[str, ToolCall]], ids: Mapping[str, str]) -> list[Segment]:
    if message.role == "system" and message.tools:
        return _tools(message.tools, "auto")
    content = "".join(message.parts)
    if message.role == "tool":
        if message.call_id is None:
            raise RenderError(f"{message.field}.tool_call_id", "must be a string that is not empty")
        content = f"## Return of {ids.get(message.call_id, message.call_id)}\n{content}"
    body: list[Segment] = [Text(content)] if content else []
    return [SPEAKERS[message.role], Text(message.name or message.role), MIDDLE, *body, *_calls(calls), END]


def _calls(calls: list[tuple[str, ToolCall]]) -> list[Segment]:
    if not calls:
        return []
    segments: list[Segment] = [SECTION_BEGIN]
    for call_id, call in calls:
        arguments = call.arguments_text
        segments += [CALL_BEGIN, Text(call_id), ARGUMENTS_BEGIN, *([Text(arguments)] if arguments else []), CALL_END]
    return [*segments, SECTION_END]

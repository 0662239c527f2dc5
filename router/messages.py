"""Chat messages as the renderers take them, read from OpenAI-shaped JSON. Every refusal names the field it is about."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from forebay.router.strict_json import parse_json

Role = Literal["system", "user", "assistant", "tool"]
ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
UNSERVED = ("function_call", "audio")  # parts of OpenAI's message that are refused rather than passed over


class RenderError(ValueError):
    """A conversation that cannot be rendered. `field` is a path such as `messages[0].content[1].type`."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """`arguments` is a JSON object, or the text as it stood where that is not one; `arguments_text` is how it came."""

    id: str | None
    name: str
    arguments: dict[str, Any] | str
    arguments_text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """`parts` are the pieces of text of the content; `calls` and `reasoning` are an assistant's, `call_id` a tool's.

    `field` is where the message stands, for errors. A tool's `name` is the function that it answers for.
    """

    field: str
    role: Role
    parts: tuple[str, ...] = ()
    name: str | None = None
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None
    tools: Sequence[Any] | None = None


def read_messages(raw: object) -> list[Message]:
    """`raw` is the decoded `messages` array of a chat completion request."""
    if not isinstance(raw, Sequence) or isinstance(raw, str | bytes) or not raw:
        raise RenderError("messages", "must be an array with at least one message")
    return [_read_message(message, f"messages[{i}]") for i, message in enumerate(raw)]


def read_tools(raw: object, field: str = "tools") -> Sequence[Any] | None:
    """The function declarations, checked for a name and otherwise as they came; None where there are none."""
    if raw is None or raw == []:
        return None
    if not isinstance(raw, list):
        raise RenderError(field, "must be an array")
    for i, tool in enumerate(raw):
        if not isinstance(tool, dict):
            raise RenderError(f"{field}[{i}]", "must be an object")
        if tool.get("type") != "function":
            raise RenderError(f"{field}[{i}].type", 'must be "function"')
        function = tool.get("function")
        if not isinstance(function, dict):
            raise RenderError(f"{field}[{i}].function", "must be an object")
        _string(function.get("name"), f"{field}[{i}].function.name")
    return raw


def _read_message(raw: object, field: str) -> Message:
    if not isinstance(raw, Mapping):
        raise RenderError(field, "must be an object")
    role = raw.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RenderError(f"{field}.role", f"must be one of {', '.join(ROLES)}")
    for name in UNSERVED:
        if raw.get(name) is not None:
            raise RenderError(f"{field}.{name}", "is not served")
    known = ROLES[role]
    calls = _read_calls(raw.get("tool_calls"), f"{field}.tool_calls") if known == "assistant" else ()
    tools = read_tools(raw.get("tools"), f"{field}.tools") if known == "system" else None
    optional = known == "assistant" or tools is not None
    return Message(
        field=field,
        role=known,
        parts=_read_content(raw.get("content"), f"{field}.content", optional=optional),
        name=_optional_string(raw.get("name"), f"{field}.name"),
        reasoning=_read_reasoning(raw, field) if known == "assistant" else "",
        calls=calls,
        call_id=_optional_string(raw.get("tool_call_id"), f"{field}.tool_call_id") if known == "tool" else None,
        tools=tools,
    )


def _read_content(raw: object, field: str, *, optional: bool) -> tuple[str, ...]:
    if isinstance(raw, str):
        return (raw,)
    if raw is None and optional:
        return ()
    if not isinstance(raw, list):
        raise RenderError(field, "must be a string or an array of text parts")
    return tuple(_read_part(part, f"{field}[{i}]") for i, part in enumerate(raw))


def _read_part(raw: object, field: str) -> str:
    if not isinstance(raw, Mapping):
        raise RenderError(field, "must be an object")
    if raw.get("type") != "text":
        raise RenderError(f"{field}.type", 'only "text" parts are served')
    text = raw.get("text")
    if not isinstance(text, str):
        raise RenderError(f"{field}.text", "must be a string")
    return text


def _read_reasoning(raw: Mapping[str, object], field: str) -> str:
    for name in ("reasoning_content", "reasoning"):
        text = raw.get(name)
        if text is not None and not isinstance(text, str):
            raise RenderError(f"{field}.{name}", "must be a string")
        if text:
            return text
    return ""


def _read_calls(raw: object, field: str) -> tuple[ToolCall, ...]:
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise RenderError(field, "must be an array")
    return tuple(_read_call(call, f"{field}[{i}]") for i, call in enumerate(raw))


def _read_call(raw: object, field: str) -> ToolCall:
    if not isinstance(raw, Mapping):
        raise RenderError(field, "must be an object")
    if raw.get("type", "function") != "function":
        raise RenderError(f"{field}.type", 'must be "function"')
    function = raw.get("function")
    if not isinstance(function, Mapping):
        raise RenderError(f"{field}.function", "must be an object")
    arguments, arguments_text = _read_arguments(function.get("arguments"), f"{field}.function.arguments")
    return ToolCall(
        id=_optional_string(raw.get("id"), f"{field}.id"),
        name=_string(function.get("name"), f"{field}.function.name"),
        arguments=arguments,
        arguments_text=arguments_text,
    )


def _read_arguments(raw: object, field: str) -> tuple[dict[str, Any] | str, str]:
    """The arguments, and their text."""
    if isinstance(raw, dict):
        return raw, write_json(raw, field)
    if raw is not None and not isinstance(raw, str):
        raise RenderError(field, "must be a string with a JSON object")
    if raw is None or not raw.strip():
        return {}, "{}"
    parsed = parse_json(raw)
    return parsed if isinstance(parsed, dict) else raw, raw


def _string(raw: object, field: str) -> str:
    if not isinstance(raw, str) or not raw:
        raise RenderError(field, "must be a string that is not empty")
    return raw


def _optional_string(raw: object, field: str) -> str | None:
    if raw is not None and not isinstance(raw, str):
        raise RenderError(field, "must be a string")
    return raw or None


def write_json(value: object, field: str, separators: tuple[str, str] = (", ", ": "), sort_keys: bool = False) -> str:
    """JSON text of a value that stands at `field`."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=separators, sort_keys=sort_keys)
    except (RecursionError, ValueError, TypeError) as error:
        raise RenderError(field, "cannot be written as JSON") from error


def tools_json(tools: object, field: str) -> str:
    """Compact JSON with keys sorted at every level, so that a client's key order does not end a hit."""
    return write_json(tools, field, separators=(",", ":"), sort_keys=True)

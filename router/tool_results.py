"""Which call a tool's result answers: clients send them in any order, the model reads them in call order."""

from collections.abc import Sequence
from dataclasses import replace

from forebay.router.messages import Message, RenderError, ToolCall


def order_results(messages: Sequence[Message]) -> list[Message]:
    """Tool results in the order of the calls that they answer, each with the name of its function.

    A run of results in which one has no known call id stays as it is; names then come from the message or from the
    place in the run.
    """
    ordered: list[Message] = []
    calls: tuple[ToolCall, ...] = ()
    run: list[Message] = []
    for message in messages:
        if message.role == "tool":
            run.append(message)
            continue
        ordered += _order_run(run, calls)
        run = []
        calls = message.calls if message.role == "assistant" else calls
        ordered.append(message)
    return ordered + _order_run(run, calls)


def _order_run(run: list[Message], calls: tuple[ToolCall, ...]) -> list[Message]:
    places = [_place(message.call_id, calls) for message in run]
    known = [place for place in places if place is not None]
    if len(known) < len(run):
        return [_named(message, message.name or _name_at(i, calls)) for i, message in enumerate(run)]
    order = sorted(range(len(run)), key=lambda i: known[i])
    return [_named(run[i], calls[known[i]].name) for i in order]


def _place(call_id: str | None, calls: tuple[ToolCall, ...]) -> int | None:
    """The call with this id, or of the alias `name:index` (index from 0)."""
    if call_id is None:
        return None
    for i, call in enumerate(calls):
        if call.id == call_id:
            return i
    return next((i for i, call in enumerate(calls) if call_id == f"{call.name}:{i}"), None)


def _name_at(i: int, calls: tuple[ToolCall, ...]) -> str | None:
    return calls[i].name if i < len(calls) else None


def _named(message: Message, name: str | None) -> Message:
    if name is None:
        raise RenderError(f"{message.field}.tool_call_id", "answers no tool call of the assistant message before it")
    return replace(message, name=name)

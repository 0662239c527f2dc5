"""The shapes of /v1/chat/completions: chunks of a stream, and the whole answer."""

from collections.abc import Sequence
from typing import Any

from forebay.router.answer import ToolCallDelta
from forebay.router.choice import CallStart, Choice, Delta, Logprob
from forebay.router.openai_shape import Shape, token_bytes, token_text
from forebay.router.tokenizer import Tokenizer


class ChatShape(Shape):
    """Shows the choices of one chat answer, as they grow or whole."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> dict[str, Any] | None:
        return self._chunk(self._choice(index, {"role": "assistant", "content": ""}))

    def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        if delta.reasoning:
            parts.append({"reasoning_content": delta.reasoning})
        if delta.content or delta.logprobs:
            parts.append({"content": delta.content})
        if delta.calls:
            parts.append({"tool_calls": [_call_part(call) for call in delta.calls]})
        return [self._chunk(self._choice(index, part, delta.logprobs if "content" in part else ())) for part in parts]

    def closing(self, index: int, choice: Choice) -> dict[str, Any]:
        return self._chunk(self._choice(index, {}, (), choice.finish_reason))

    def whole_choice(self, index: int, choice: Choice, deltas: Sequence[Delta]) -> dict[str, Any]:
        calls = _whole_calls(deltas)
        content = "".join(delta.content for delta in deltas)
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        if reasoning := "".join(delta.reasoning for delta in deltas):
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        logprobs = [entry for delta in deltas for entry in delta.logprobs]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(logprobs) if self.with_logprobs else None,
            "finish_reason": choice.finish_reason,
        }

    def _choice(
        self, index: int, delta: dict[str, Any], logprobs: Sequence[Logprob] = (), finish_reason: str | None = None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(logprobs) if logprobs else None,
            "finish_reason": finish_reason,
        }

    def _logprobs(self, entries: Sequence[Logprob]) -> dict[str, Any]:
        return {"content": [_entry(self.tokenizer, each) for each in entries], "refusal": None}


def _entry(tokenizer: Tokenizer, entry: Logprob) -> dict[str, Any]:
    top = [_one(tokenizer, token_id, logprob) for token_id, logprob in entry.token.top]
    assert entry.token.logprob is not None
    return _one(tokenizer, entry.token.id, entry.token.logprob) | {"top_logprobs": top}


def _one(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_text(tokenizer, token_id),
        "logprob": logprob,
        "bytes": list(token_bytes(tokenizer, token_id)),
    }


def _call_part(call: CallStart | ToolCallDelta) -> dict[str, Any]:
    if isinstance(call, CallStart):
        function = {"name": call.name, "arguments": ""}
        return {"index": call.index, "id": call.id, "type": "function", "function": function}
    return {"index": call.index, "function": {"arguments": call.arguments}}


def _whole_calls(deltas: Sequence[Delta]) -> list[dict[str, Any]]:
    parts = [part for delta in deltas for part in delta.calls]
    return [
        {
            "id": start.id,
            "type": "function",
            "function": {
                "name": start.name,
                "arguments": "".join(
                    part.arguments for part in parts if isinstance(part, ToolCallDelta) and part.index == start.index
                ),
            },
        }
        for start in parts
        if isinstance(start, CallStart)
    ]

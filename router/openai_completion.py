"""The shapes of /v1/completions: chunks of a stream, and the whole answer."""

from collections.abc import Sequence
from typing import Any

from forebay.router.choice import Choice, Delta, Logprob
from forebay.router.openai_shape import Shape, token_text


class CompletionShape(Shape):
    """Shows the choices of one completion, as they grow or whole. Both forms are one object."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        if not delta.content and not delta.logprobs:
            return []
        return [self._chunk(self._choice(index, delta.content, delta.logprobs, None))]

    def closing(self, index: int, choice: Choice) -> dict[str, Any]:
        return self._chunk(self._choice(index, "", (), choice.finish_reason))

    def whole_choice(self, index: int, choice: Choice, deltas: Sequence[Delta]) -> dict[str, Any]:
        text = "".join(delta.content for delta in deltas)
        logprobs = [entry for delta in deltas for entry in delta.logprobs]
        return self._choice(index, text, logprobs, choice.finish_reason)

    def _choice(self, index: int, text: str, logprobs: Sequence[Logprob], finish_reason: str | None) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(logprobs) if logprobs else None,
            "finish_reason": finish_reason,
        }

    def _logprobs(self, entries: Sequence[Logprob]) -> dict[str, Any]:
        name = self.tokenizer
        return {
            "tokens": [token_text(name, each.token.id) for each in entries],
            "token_logprobs": [each.token.logprob for each in entries],
            "top_logprobs": [{token_text(name, key): value for key, value in each.token.top} for each in entries],
            "text_offset": [each.offset for each in entries],
        }

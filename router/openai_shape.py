"""What the shapes of OpenAI's two endpoints share: identity, usage, and how tokens are shown."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from forebay.router.choice import Choice, Delta
from forebay.router.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of a whole answer: every prompt once, every choice."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int

    def shown(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.output_tokens,
            "total_tokens": self.prompt_tokens + self.output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


class Shape(ABC):
    """An answer in one API's shape. `created` is in seconds since the epoch."""

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self, tokenizer: Tokenizer, model: str, created: int, *, include_usage: bool, with_logprobs: bool
    ) -> None:
        self.tokenizer = tokenizer
        self.with_logprobs = with_logprobs
        self._head = {"id": f"{self.prefix}-{secrets.token_hex(16)}", "created": created, "model": model}
        self._include_usage = include_usage

    @abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """The first chunk of a choice, if the API has one."""

    @abstractmethod
    def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """The chunks of a delta: none that is empty."""

    @abstractmethod
    def closing(self, index: int, choice: Choice) -> dict[str, Any]:
        """The last chunk of a choice, with its finish reason."""

    @abstractmethod
    def whole_choice(self, index: int, choice: Choice, deltas: Sequence[Delta]) -> dict[str, Any]:
        """A choice of an answer that is not streamed."""

    def whole(self, choices: Sequence[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return self._head | {"object": self.whole_object, "choices": list(choices), "usage": usage.shown()}

    def usage_chunk(self, usage: Usage) -> dict[str, Any] | None:
        """The chunk without choices that ends a stream, where the client asked for it."""
        if not self._include_usage:
            return None
        return self._head | {"object": self.chunk_object, "choices": [], "usage": usage.shown()}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        usage: dict[str, Any] = {"usage": None} if self._include_usage else {}
        return self._head | {"object": self.chunk_object, "choices": [choice]} | usage


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """A token's bytes; a special token's are those of its name."""
    name = tokenizer.name_of(token_id)
    return tokenizer.token_bytes(token_id) if name is None else name.encode()


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as text; bytes that are no UTF-8 become U+FFFD."""
    return token_bytes(tokenizer, token_id).decode(errors="replace")

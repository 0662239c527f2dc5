"""What one attempt at a request has brought so far: its choices, and the tokens to be accounted for."""

from typing import Any

from forebay.router.ask import Ask, TextSide
from forebay.router.choice import Choice, Delta
from forebay.router.openai_shape import Shape, Usage
from forebay.router.wire import Finished, Started, Stop, Tokens


class Progress:
    """Feeds frames to choices. Each call returns the chunks that the frame makes, none for an answer shown whole."""

    def __init__(self, ask: Ask, text: TextSide, shape: Shape) -> None:
        self._ask = ask
        self._shape = shape
        self._choices = [Choice(ask, text) for _ in range(ask.choices)]
        self._deltas: list[list[Delta]] = [[] for _ in self._choices]
        self._opened: set[int] = set()
        self._started: dict[int, Started] = {}

    def started(self, index: int, frame: Started) -> None:
        self._started[index] = frame

    def tokens(self, index: int, frame: Tokens) -> list[dict[str, Any]]:
        chunks = self._open(index) + self._add(index, self._choices[index].feed(frame.tokens))
        return chunks + (self._close(index) if self.complete(index) else [])

    def finished(self, index: int, frame: Finished) -> list[dict[str, Any]]:
        if self.complete(index):
            return []
        return self._open(index) + self._add(index, self._choices[index].finish(frame.reason)) + self._close(index)

    def complete(self, index: int) -> bool:
        """The choice needs no more tokens."""
        return self._choices[index].finish_reason is not None

    @property
    def all_started(self) -> bool:
        return len(self._started) == len(self._choices)

    @property
    def computed_tokens(self) -> int:
        """Prefill that the jobs so far have really computed."""
        return sum(frame.computed_tokens for frame in self._started.values())

    @property
    def stop(self) -> Stop:
        """How a turn ended whose choices are complete."""
        return "tool_use" if any(choice.finish_reason == "tool_calls" for choice in self._choices) else "end_turn"

    def usage(self) -> Usage:
        """Cached tokens are what the first choice of each prompt found: the others find what that one computed."""
        first = [frame for index, frame in self._started.items() if index % self._ask.n == 0]
        return Usage(
            prompt_tokens=self._ask.prompt_tokens,
            cached_tokens=sum(frame.cached_tokens for frame in first),
            output_tokens=sum(choice.tokens for choice in self._choices),
            reasoning_tokens=sum(choice.reasoning_tokens for choice in self._choices),
        )

    def last_chunks(self) -> list[dict[str, Any]]:
        chunk = self._shape.usage_chunk(self.usage())
        return [chunk] if chunk else []

    def whole(self) -> dict[str, Any]:
        """The answer of a request that is not streamed."""
        choices = zip(self._choices, self._deltas, strict=True)
        shown = [self._shape.whole_choice(index, choice, deltas) for index, (choice, deltas) in enumerate(choices)]
        return self._shape.whole(shown, self.usage())

    def _open(self, index: int) -> list[dict[str, Any]]:
        if not self._ask.stream or index in self._opened:
            return []
        self._opened.add(index)
        chunk = self._shape.opening(index)
        return [chunk] if chunk else []

    def _add(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        if self._ask.stream:
            return self._shape.chunks(index, delta)
        if delta:
            self._deltas[index].append(delta)
        return []

    def _close(self, index: int) -> list[dict[str, Any]]:
        return [self._shape.closing(index, self._choices[index])] if self._ask.stream else []

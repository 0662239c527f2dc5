"""One choice of an answer as it grows: token ids in, deltas out. Knows nothing of any API's shape."""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from forebay.router.answer import (
    ContentDelta,
    Event,
    ReasoningDelta,
    StreamParser,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from forebay.router.ask import Ask, TextSide
from forebay.router.detokenize import Detokenizer
from forebay.router.segment import Segment, Text
from forebay.router.stop import StopStrings
from forebay.router.wire import WireToken

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class CallStart:
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """One token of the visible text. `offset` is where it begins there, in characters; `top` as (token, logprob)."""

    token: WireToken
    offset: int


@dataclass(slots=True)
class Delta:
    """What one frame adds. Texts may be empty; `calls` are starts and parts of arguments, in order."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallStart | ToolCallDelta] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls or self.logprobs)


class _PlainText:
    """The parser of a completion: text is content, special tokens are not shown."""

    def feed(self, segment: Segment) -> list[Event]:
        return [ContentDelta(segment.text)] if isinstance(segment, Text) else []

    def finish(self, *, cut: bool) -> list[Event]:
        return []


class Choice:
    """`tokens` counts all that were generated; `reasoning_tokens` those before the first visible one, when thinking.

    `finish_reason` is set when the choice is complete: by `finish`, or earlier by a stop string.
    """

    def __init__(self, ask: Ask, text: TextSide) -> None:
        self.finish_reason: FinishReason | None = None
        self.tokens = 0
        self.reasoning_tokens = 0
        self._ask = ask
        self._eos_ids = text.tokenizer.eos_ids
        self._name_of = text.tokenizer.name_of
        self._detokenizer = Detokenizer(text.tokenizer)
        self._stops = StopStrings(ask.stops)
        self._parser: StreamParser = _PlainText()
        if ask.kind == "chat":
            assert text.format is not None
            self._parser = text.format.new_parser(ask.thinking)
        self._thinking = ask.thinking
        self._last_id = -1
        self._calls_begun = 0
        self._calls_ended = 0
        self._content_chars = 0
        self._undecided: list[Logprob] = []  # tokens that may yet turn out to be a part of the visible text

    def feed(self, tokens: Sequence[WireToken]) -> Delta:
        """The next tokens. What comes after the choice is complete is not looked at."""
        delta = Delta()
        for token in tokens:
            if self.finish_reason is not None:
                break
            self.tokens += 1
            self._last_id = token.id
            events = self._parse(self._detokenizer.feed([token.id]))
            self._count_reasoning(events)
            self._note_logprob(token, events, delta)
            self._show(events, delta)
        return delta

    def finish(self, reason: Literal["stop", "length"]) -> Delta:
        """The job is over. A call that was cut off does not make the answer a tool call."""
        delta = Delta()
        if self.finish_reason is not None:
            return delta
        cut = reason == "length" or self._last_id not in self._eos_ids
        events = self._parse(self._detokenizer.finish()) + self._parser.finish(cut=cut)
        if any(isinstance(event, ContentDelta) for event in events):
            delta.logprobs += self._undecided
        self._show(events, delta)
        if self.finish_reason is None:
            delta.content += self._stops.finish()
            self.finish_reason = "tool_calls" if reason == "stop" and self._calls_ended else reason
        return delta

    def _parse(self, segments: Iterable[Segment]) -> list[Event]:
        return [event for segment in segments for event in self._parser.feed(segment)]

    def _show(self, events: Sequence[Event], delta: Delta) -> None:
        for event in events:
            match event:
                case ReasoningDelta(text):
                    delta.reasoning += text
                case ContentDelta(text):
                    self._content_chars += len(text)
                    shown, met = self._stops.feed(text)
                    delta.content += shown
                    if met:
                        self.finish_reason = "stop"
                        return
                case ToolCallStart() | ToolCallDelta() | ToolCallEnd() if self._ask.calls:
                    self._call(event, delta)
                    if self.finish_reason is not None:
                        return

    def _call(self, event: ToolCallStart | ToolCallDelta | ToolCallEnd, delta: Delta) -> None:
        match event:
            case ToolCallStart(index, name, call_id):
                if self._calls_begun and not self._ask.parallel_calls:
                    self.finish_reason = "tool_calls"
                    return
                self._calls_begun += 1
                delta.calls.append(CallStart(index, call_id or f"call_{secrets.token_hex(12)}", name))
            case ToolCallDelta():
                delta.calls.append(event)
            case ToolCallEnd():
                self._calls_ended += 1

    def _count_reasoning(self, events: Sequence[Event]) -> None:
        self._thinking = self._thinking and all(isinstance(event, ReasoningDelta) for event in events)
        self.reasoning_tokens += self._thinking

    def _note_logprob(self, token: WireToken, events: Sequence[Event], delta: Delta) -> None:
        """Keep the log probabilities of tokens whose text is visible; a part of a character waits for the rest."""
        if token.logprob is None:
            return
        if self._name_of(token.id) is not None:
            self._undecided = []
            return
        self._undecided.append(Logprob(token=token, offset=self._content_chars))
        if events:
            visible = any(isinstance(event, ContentDelta) for event in events)
            delta.logprobs += self._undecided if visible else []
            self._undecided = []

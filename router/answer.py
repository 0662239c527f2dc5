"""Answer events: what a streaming parser makes of a model's turn, whatever the chat format.

Text deltas are never empty. Calls are numbered from 0 in order of appearance; the deltas of one call add up to the text
of its arguments.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from forebay.router.segment import Segment


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Visible text: the only events that stop strings apply to."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """`id` is None where the format has no call ids; the caller mints one."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The next part of the arguments' JSON text."""

    index: int
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The call is complete. A call that was cut off has no end."""

    index: int


Event = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallDelta | ToolCallEnd


class StreamParser(Protocol):
    """One choice's stream, from after the generation prompt. Never raises, whatever the model emits."""

    def feed(self, segment: Segment) -> list[Event]: ...

    def finish(self, *, cut: bool) -> list[Event]:
        """The stream is over. `cut`: the model did not end its turn itself (length, cancel): what is open stays so."""


NewParser = Callable[[bool], StreamParser]

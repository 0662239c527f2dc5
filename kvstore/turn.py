"""Who uses blocks, when, and how the session's turns end: what the store is told to learn from."""

from dataclasses import dataclass
from typing import Literal

Stop = Literal["tool_use", "end_turn", ""]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of a session runs at `now`, seconds of any clock that grows. `session` "": of nobody known.

    `stop`: how the session's turn before this one ended, "" where that is not known. How this one ends is told by
    `Store.turn_ended`, once it is known.
    """

    session: str = ""
    stop: Stop = ""
    class_name: str = ""
    moved: bool = False
    """Another cluster has served the session until now, or should have."""

    again: bool = False
    """The same turn used these blocks before: a further choice, or once more after a failure. Nothing is learned."""

    now: float

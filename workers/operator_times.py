"""Where a step's time goes: operators are timed from outside, by names put around their functions while one looks.

On a CPU by the wall clock. On a GPU by events on the stream: those of a step that is made launch by launch, gaps
between launches included, or those of a captured step, where the events are part of the graph.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

Mark = Any
"""A time of the wall clock in s, or an event."""

Places = tuple[tuple[Any, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operators:
    """`places`: functions and methods in which an operator runs, by the owner of their name. `inside`: operators that
    run within another's functions, whose time is not the other's.
    """

    places: Mapping[str, Places]
    inside: Mapping[str, str]


class OperatorTimes:
    def __init__(self, operators: Operators, device: torch.device, in_graph: bool) -> None:
        self._operators, self._on_gpu, self._in_graph = operators, device.type == "cuda", in_graph
        self._marks: list[tuple[str, Mark, Mark]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """What runs inside is timed; the latest whole step counts, which starts at `restart`."""
        with ExitStack() as undo:
            for name, places in self._operators.places.items():
                for owner, attribute in places:
                    original = getattr(owner, attribute)
                    setattr(owner, attribute, self._timed(name, original))
                    undo.callback(setattr, owner, attribute, original)
            yield

    def restart(self) -> None:
        self._marks.clear()

    def keep_last_half(self) -> None:
        """Of two equal steps the second, as where one ran before its like was captured."""
        del self._marks[: len(self._marks) // 2]

    def ms(self) -> dict[str, float]:
        """By operator, each without those inside it. Everything launched must have ended."""
        whole = dict.fromkeys(self._operators.places, 0.0)
        for name, before, after in self._marks:
            whole[name] += before.elapsed_time(after) if self._on_gpu else (after - before) * 1e3
        own = dict(whole)
        for inner, outer in self._operators.inside.items():
            own[outer] -= whole[inner]
        return own

    def _timed(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            before = self._mark()
            made = original(*args, **named)
            self._marks.append((name, before, self._mark()))
            return made

        return timed

    def _mark(self) -> Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True, external=self._in_graph)  # type: ignore[no-untyped-call]
        event.record()
        return event

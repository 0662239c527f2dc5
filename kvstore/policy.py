"""Policies: pure functions of plain numbers. Which states to keep, and what a unit is worth to the eviction."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Quantity = TypeVar("Quantity", float, npt.NDArray[np.float64])

DEFAULT_CHECKPOINTS = "prompt_end+junction+interval:32768"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCost:
    """Seconds to prefill: so much a token, and so much for each pair of a token and one before it (attention)."""

    token_s: float
    pair_s: float

    def seconds(self, start: Quantity, end: Quantity) -> Quantity:
        """To compute tokens [start, end) of one prompt; or of many, in arrays of float."""
        return self.token_s * (end - start) + self.pair_s * (end * end - start * start) / 2


def worth(saved_s: Quantity, held_bytes: int, density: Quantity) -> Quantity:
    """Seconds of prefill saved per byte held and unit of time: what a use saves, times the uses expected per unit of
    time by holding on (reuse.Reuse.density). Of one unit, or of many at once."""
    return saved_s / held_bytes * density


def recency(age_ticks: Quantity) -> Quantity:
    """The density where nothing is known but the age: reuse with a long tail makes it fall as 1 / (1 + age)."""
    return 1 / (1 + age_ticks)


def checkpoints_for(
    policy: str, *, n_prompt: int, hit_tokens: int, block_tokens: int, branches: Sequence[int] = ()
) -> tuple[int, ...]:
    """Positions in (hit_tokens, n_prompt], ascending multiples of the block, at which to keep the state.

    `policy` is a name or names joined by '+':
    prompt_end   the last block end of the prompt, which the next turn extends; where the prompt ends on it, also the
                 one before, since the same prompt sent again still computes its last token
    junction     `branches`: block ends where this prompt and a stored one were seen to part
    interval:N   every N tokens
    """
    wanted: set[int] = set()
    for name, argument in parse(policy):
        wanted.update(_PLACES[name](argument, n_prompt, block_tokens, branches))
    return tuple(sorted(at for at in wanted if hit_tokens < at <= n_prompt and at % block_tokens == 0))


def parse(policy: str) -> tuple[tuple[str, int], ...]:
    """Names and arguments (0: none) of a policy. Raises ValueError that says what is wrong."""
    return tuple(_parse_one(part) for part in policy.split("+"))


def _parse_one(part: str) -> tuple[str, int]:
    name, _, argument = part.partition(":")
    if name not in _PLACES:
        raise ValueError(f"checkpoints: unknown policy {part!r}: known are prompt_end, junction, interval:N")
    if name != "interval":
        if argument:
            raise ValueError(f"checkpoints: policy {part!r}: {name} takes no number")
        return name, 0
    if not argument.isdecimal() or int(argument) < 1:
        raise ValueError(f"checkpoints: policy {part!r}: interval needs a number of tokens, as in interval:32768")
    return name, int(argument)


def _prompt_end(_: int, n_prompt: int, block_tokens: int, branches: Sequence[int]) -> Sequence[int]:
    return [n_prompt // block_tokens * block_tokens, (n_prompt - 1) // block_tokens * block_tokens]


def _junction(_: int, n_prompt: int, block_tokens: int, branches: Sequence[int]) -> Sequence[int]:
    return branches


def _interval(every: int, n_prompt: int, block_tokens: int, branches: Sequence[int]) -> Sequence[int]:
    step = -(-every // block_tokens) * block_tokens
    return range(step, n_prompt + 1, step)


_PLACES: dict[str, Callable[[int, int, int, Sequence[int]], Sequence[int]]] = {
    "prompt_end": _prompt_end,
    "junction": _junction,
    "interval": _interval,
}

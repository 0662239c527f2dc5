"""A job: everything needed to run one choice of one request anywhere, and to run it again.

`ids[:n_prompt]` are restored or prefilled on the grid; `ids[n_prompt:]` were generated before and are
forced through decode steps, since the chunked and the recurrent form differ in the last bits.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

FinishReason = Literal["stop", "length"]
FailureKind = Literal["invalid", "overloaded", "deadline", "cancelled", "preempted", "handoff", "internal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who owns slots, leases and jobs in a worker. A new epoch of the same name frees what the old one held."""

    name: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen. `logprobs` is None, or how many alternatives to report (0: the chosen alone)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    max_tokens: int
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """Lower `priority` goes first. `max_tokens` counts from `n_prompt`. `timeout_s` is a duration, not a clock time."""

    id: str
    ids: npt.NDArray[np.int32]
    n_prompt: int
    seed: int
    choice: int = 0
    sampling: Sampling
    priority: int = 0
    timeout_s: float
    session: str = ""
    salt: str = ""
    class_name: str = ""
    stop: Literal["tool_use", "end_turn", ""] = ""
    """How the session's turn before this one ended, "" where that is not known."""

    moved: bool = False
    """Another cluster has served the session until now, or should have."""

    @property
    def n_forced(self) -> int:
        return len(self.ids) - self.n_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChoice:
    """One generated token. `logprob` and `top` (id, logprob; best first) only where the job asked for them."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a job ended without finishing, as a value."""

    job_id: str
    kind: FailureKind
    message: str

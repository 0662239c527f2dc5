"""What router and ingress say to each other: one JSON request in token ids, answered by JSON lines (frames).

Durations travel, never clock times. A refusal before the first frame is an HTTP status (429, 503) with a `Failed` body.
"""

from typing import Literal

import msgspec

Stop = Literal["tool_use", "end_turn", ""]
"""How a turn ended: with calls of tools, with an answer, or not known. A request says it of its session's last."""

FailedKind = Literal["invalid", "overloaded", "no_workers", "deadline", "internal"]


class WireSampling(msgspec.Struct, frozen=True, kw_only=True):
    """Field for field the worker's `Sampling` (the two rooms do not know each other; cluster converts)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: list[tuple[int, float]] = []
    logprobs: int | None = None
    max_tokens: int
    min_tokens: int = 0
    stop_ids: list[int] = []


class JobRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of one request: POST /jobs of an ingress. `class_name` labels metrics; lower `priority` goes first.

    `moved`: another cluster has served the session until now, or should have, so a miss is no wonder.
    """

    id: str
    ids: list[int]
    n_prompt: int
    seed: int
    choice: int = 0
    sampling: WireSampling
    class_name: str = "default"
    priority: int = 0
    timeout_s: float
    session: str = ""
    salt: str = ""
    stop: Stop = ""
    moved: bool = False


class WireToken(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: int
    logprob: float | None = None
    top: list[tuple[int, float]] = []


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """Prefill is done. `computed_tokens` is what it really computed; `miss` says why the hit was not longer."""

    cached_tokens: int
    computed_tokens: int
    miss: str | None = None


class Tokens(msgspec.Struct, frozen=True, kw_only=True, tag="tokens"):
    tokens: list[WireToken]


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    reason: Literal["stop", "length"]


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    kind: FailedKind
    message: str
    retry_after_s: float | None = None


Frame = Started | Tokens | Finished | Failed
decode_frame = msgspec.json.Decoder(Frame).decode
decode_job = msgspec.json.Decoder(JobRequest).decode
decode_stop = msgspec.json.Decoder(Stop).decode
"""Of PUT /sessions/{session}/turn: how the session's turn ended, told once it has."""

encode = msgspec.json.Encoder().encode

"""Mooncake JSONL traces: one request a line, its prompt as ids of blocks of 512 tokens.

Equal ids mean equal blocks after equal prefixes (ids are renumbered chained hashes); the last block may be partial.
Rows hold whole prompts, never deltas, with or without a `session_id`. Other fields are ignored.
"""

import gzip
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

BLOCK_TOKENS = 512


class TraceError(ValueError):
    """The file is not a trace; says where and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One recorded request. `session` is the file's own name of its session, where it has one."""

    timestamp_ms: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    session: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HitRate:
    """What a cache held of a trace. Rates weigh blocks and tokens, not requests."""

    hit_blocks: int
    blocks: int
    hit_tokens: int
    tokens: int

    @property
    def by_block(self) -> float:
        return self.hit_blocks / self.blocks if self.blocks else 0.0

    @property
    def by_token(self) -> float:
        return self.hit_tokens / self.tokens if self.tokens else 0.0


class _Row(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=0)]
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0)]]
    session_id: str | None = None


_decode = msgspec.json.Decoder(_Row).decode


def read(path: Path) -> list[Request]:
    """All requests of a file, plain or .gz, in file order."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            return parse(lines, str(path))
    except (OSError, EOFError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error


def parse(lines: Iterable[bytes], name: str) -> list[Request]:
    """All requests of some lines; `name` stands in errors. Empty lines are skipped."""
    requests = [_request(line, f"{name}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise TraceError(f"{name}: holds no requests")
    return requests


def _request(line: bytes, where: str) -> Request:
    try:
        row = _decode(line)
    except msgspec.DecodeError as error:  # wrong types and values included
        raise TraceError(f"{where}: {error}") from error
    blocks = -(-row.input_length // BLOCK_TOKENS)
    if len(row.hash_ids) != blocks:
        raise TraceError(
            f"{where}: {row.input_length} input tokens are {blocks} blocks of {BLOCK_TOKENS}, "
            f"but hash_ids has {len(row.hash_ids)}"
        )
    return Request(
        timestamp_ms=row.timestamp,
        input_tokens=row.input_length,
        output_tokens=row.output_length,
        hash_ids=tuple(row.hash_ids),
        session=row.session_id,
    )


def infinite_cache(requests: Iterable[Request]) -> HitRate:
    """Hits of a cache that never forgets: requests one at a time in order, partial last blocks cached like full ones.

    A request hits the longest prefix of its blocks that was seen before; its answer's tokens are not cached.
    """
    seen: set[int] = set()
    hit_blocks = blocks = hit_tokens = tokens = 0
    for request in requests:
        ids = request.hash_ids
        hit = next((i for i, block in enumerate(ids) if block not in seen), len(ids))
        hit_blocks += hit
        blocks += len(ids)
        hit_tokens += min(hit * BLOCK_TOKENS, request.input_tokens)
        tokens += request.input_tokens
        seen.update(ids)
    return HitRate(hit_blocks=hit_blocks, blocks=blocks, hit_tokens=hit_tokens, tokens=tokens)

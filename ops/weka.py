"""Recorded agent sessions in the weka form: one JSON document a session, its prompts as ids of 64-token blocks.

A file holds one document, or one a line (plain or .gz). A request's blocks stand in `hash_ids`, or re-encoded in `h`:
[k, start, n, start, n, ...], the first k ids of the request before in the same list, then runs start .. start+n-1.
Ids are chained hashes renumbered within the session, full blocks only. So the id of the last 64-token block of a longer
block names it, and all before it.
"""

import gzip
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from forebay.ops.trace import BLOCK_TOKENS, TraceError

FILE_BLOCK_TOKENS = 64
GAP_S_MAX, STAGGER_S, BETWEEN_SESSIONS_S = 60.0, 5.0, 10.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """One recorded call. `blocks` int64 names the prompt's full blocks; `stop` is tool_use, end_turn or not known."""

    at_s: float
    input_tokens: int
    blocks: npt.NDArray[np.int64]
    stop: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Calls of the main stream and of its sub-agents, in time order."""

    id: str
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """A call of a session at the time of a replay. `session` differs where a session is played once more."""

    at_s: float
    session: str
    call: Call


class _Request(msgspec.Struct, rename={"input": "in"}):
    type: str
    t: float
    input: int = 0
    stop: str = ""
    hash_ids: list[int] | None = None
    h: list[int] | None = None
    requests: "list[_Request] | None" = None


class _Document(msgspec.Struct):
    id: str
    block_size: int
    requests: list[_Request]


_decode = msgspec.json.Decoder(_Document).decode


def is_weka(path: Path) -> bool:
    """Whether a file's first kilobytes name a session's `block_size` and `requests`, as no row of Mooncake's does."""
    head = _bytes(path, 1 << 16)
    return b'"block_size"' in head and b'"requests"' in head


def read(path: Path, block_tokens: int = BLOCK_TOKENS) -> list[Session]:
    """All sessions of a file, in its order, their prompts in blocks of `block_tokens` (a multiple of 64)."""
    assert block_tokens % FILE_BLOCK_TOKENS == 0
    return parse(_bytes(path), str(path), block_tokens)


def parse(data: bytes, name: str, block_tokens: int = BLOCK_TOKENS) -> list[Session]:
    """All sessions of a file's bytes; `name` stands in errors."""
    try:
        documents = [_decode(line) for line in data.splitlines() if line.strip()]
    except msgspec.DecodeError:
        documents = [_whole(data, name)]
    if not documents:
        raise TraceError(f"{name}: holds no sessions")
    return [_session(document, f"{name}, session {document.id}", block_tokens) for document in documents]


def lanes(sessions: Sequence[Session], n_lanes: int, seconds: float, gap_s_max: float = GAP_S_MAX) -> Iterator[Visit]:
    """Closed lanes, in time order up to `seconds`.

    Lane i starts at 5 i seconds. It takes the next session of the list (begun anew at its end) ten seconds after its
    own ended. Gaps within a session are the recorded ones from start to start, each cut to `gap_s_max`.
    """
    taken = 0
    playing: dict[int, Iterator[Visit]] = {}
    due: list[tuple[float, int, Visit]] = []
    for lane in range(n_lanes):
        playing[lane] = _play(sessions, taken, lane * STAGGER_S, gap_s_max)
        taken += 1
        first = next(playing[lane])
        heapq.heappush(due, (first.at_s, lane, first))
    while due:
        at_s, lane, visit = heapq.heappop(due)
        if at_s > seconds:
            continue
        yield visit
        following = next(playing[lane], None)
        if following is None:
            playing[lane] = _play(sessions, taken, at_s + min(gap_s_max, BETWEEN_SESSIONS_S), gap_s_max)
            taken += 1
            following = next(playing[lane])
        heapq.heappush(due, (following.at_s, lane, following))


def _play(sessions: Sequence[Session], taken: int, start_s: float, gap_s_max: float) -> Iterator[Visit]:
    session = sessions[taken % len(sessions)]
    at_s, before = start_s, session.calls[0].at_s
    for call in session.calls:
        at_s += min(max(call.at_s - before, 0.0), gap_s_max)
        before = call.at_s
        yield Visit(at_s=at_s, session=f"{session.id}/{taken // len(sessions)}", call=call)


def _bytes(path: Path, limit: int = -1) -> bytes:
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            return file.read(limit)
    except (OSError, EOFError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error


def _whole(data: bytes, name: str) -> _Document:
    try:
        return _decode(data)
    except msgspec.DecodeError as error:
        raise TraceError(f"{name}: {error}") from error


def _session(document: _Document, where: str, block_tokens: int) -> Session:
    if document.block_size != FILE_BLOCK_TOKENS:
        raise TraceError(f"{where}: block_size is {document.block_size}, not {FILE_BLOCK_TOKENS}")
    calls = sorted(_calls(document.requests, where, block_tokens, None), key=lambda call: call.at_s)
    if not calls:
        raise TraceError(f"{where}: holds no calls")
    return Session(id=document.id, calls=tuple(calls))


def _calls(requests: Sequence[_Request], where: str, block_tokens: int, spawn_s: float | None) -> Iterator[Call]:
    """Calls of one list; a sub-agent's times are absolute, or from its spawn where smaller than that."""
    before = np.empty(0, np.int64)
    for request in requests:
        if request.type == "subagent":
            yield from _calls(request.requests or (), where, block_tokens, request.t)
            continue
        before = ids = _ids(request, before, where)
        step = block_tokens // FILE_BLOCK_TOKENS
        at_s = request.t if spawn_s is None or request.t >= spawn_s else spawn_s + request.t
        yield Call(at_s=at_s, input_tokens=request.input, blocks=ids[step - 1 :: step].copy(), stop=request.stop)


def _ids(request: _Request, before: npt.NDArray[np.int64], where: str) -> npt.NDArray[np.int64]:
    if request.hash_ids is not None:
        return np.array(request.hash_ids, np.int64)
    runs = request.h
    if runs is None or len(runs) % 2 == 0 or not 0 <= runs[0] <= len(before):
        raise TraceError(f"{where}: a request at {request.t} s has neither hash_ids nor h = [k, start, n, ...]")
    return np.concatenate(
        [before[: runs[0]], *(np.arange(start, start + n) for start, n in zip(runs[1::2], runs[2::2], strict=True))]
    )

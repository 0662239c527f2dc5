"""The order inside sessions: which request has to be over before the next one is sent.

A trace with session ids says it. Without them it is derived: a request's parent is the earlier request whose full
blocks are the longest prefix of its own (the latest among equals), as a turn's prompt is the last turn's prompt and
more. A parent has at least two full blocks: one is mostly the system prompt, which strangers share. The first child of
a parent continues its session; any other child is a branch and begins a session of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from forebay.ops.trace import BLOCK_TOKENS, Request

PARENT_BLOCKS_MIN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A request in its session. `parent` is the index of the request to wait for; it is always a smaller one."""

    index: int
    request: Request
    parent: int | None
    session: str
    number: int


def turns(requests: Sequence[Request]) -> list[Turn]:
    """One turn a request, in the same order."""
    assert all(a.timestamp_ms <= b.timestamp_ms for a, b in pairwise(requests)), "requests are sorted by time"
    latest: dict[int | str, int] = {}
    done: list[Turn] = []
    continued: set[int] = set()
    for index, request in enumerate(requests):
        parent = _parent(request, latest)
        follows = parent is not None and (request.session is not None or parent not in continued)
        done.append(_turn(index, request, None if parent is None else done[parent], follows))
        if parent is not None:
            continued.add(parent)
        if (key := _key(request)) is not None:
            latest[key] = index
    return done


def _turn(index: int, request: Request, parent: Turn | None, follows: bool) -> Turn:
    return Turn(
        index=index,
        request=request,
        parent=parent.index if parent else None,
        session=parent.session if parent and follows else f"replay-{request.session or index}",
        number=parent.number + 1 if parent and follows else 0,
    )


def _parent(request: Request, latest: dict[int | str, int]) -> int | None:
    if request.session is not None:
        return latest.get(request.session)
    return next((latest[block] for block in reversed(request.hash_ids) if block in latest), None)


def _key(request: Request) -> int | str | None:
    """What a child finds the request by: its session, or its last full block, which stands for all before it."""
    full = request.input_tokens // BLOCK_TOKENS
    if request.session is not None:
        return request.session
    return request.hash_ids[full - 1] if full >= PARENT_BLOCKS_MIN else None

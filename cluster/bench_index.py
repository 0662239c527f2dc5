"""`forebay bench index TRACE`: the store's index alone, driven by a recorded trace; no model and no bytes."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from forebay.cluster.bench_index_flags import EVERY
from forebay.kernels.costs import index_row_bytes, latent_row_bytes, state_bytes
from forebay.kernels.models import SHAPES
from forebay.kvstore.config import StoreConfig
from forebay.kvstore.forest import Forest, Lookup, plant
from forebay.kvstore.index_replay import Tally, forebay, lru, optimal, states
from forebay.kvstore.index_states import Charge, cuts
from forebay.kvstore.policy import DEFAULT_CHECKPOINTS, parse
from forebay.ops import weka
from forebay.ops.bench_report import Reference, Row, report, table, write_json
from forebay.ops.trace import BLOCK_TOKENS, Request, TraceError, read

Evict = Literal["lru", "forebay", "optimal"]
DEFAULT_SHAPE = "k3.1-pro"
BETWEEN_SESSIONS_S = 10.0
COST = StoreConfig(device_bytes=1, run_dir="").cost


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexBench:
    """One replay. Capacity in tokens (rows alone) or in bytes (checkpoints too), None: unbounded; one of them at most.

    `checkpoints`: "every" block's end can be resumed for nothing, or a policy by its names. `lanes` 0: as recorded.
    Look-ups before `warm_s` fill the cache and are not counted.
    """

    trace: Path
    capacity_tokens: int | None = None
    capacity_bytes: int | None = None
    shape: str = DEFAULT_SHAPE
    evict: Evict = "forebay"
    checkpoints: str = EVERY
    lanes: int = 0
    seconds: float = 7200.0
    warm_s: float = 0.0
    block_tokens: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        if self.checkpoints != EVERY:
            parse(self.checkpoints)
        if self.capacity_tokens is not None and self.capacity_bytes is not None:
            raise ValueError("capacity: in tokens or in bytes, not both")
        if self.capacity_bytes is not None and self.checkpoints == EVERY:
            raise ValueError(f"checkpoints: bytes charge for them: name a policy, as in {DEFAULT_CHECKPOINTS}")
        if self.block_tokens < weka.FILE_BLOCK_TOKENS or self.block_tokens % weka.FILE_BLOCK_TOKENS:
            raise ValueError(f"block-tokens: must be a multiple of {weka.FILE_BLOCK_TOKENS}")
        if self.shape not in SHAPES:
            raise ValueError(f"shape: {self.shape!r} is none of {', '.join(SHAPES)}")


def bench_index(bench: IndexBench, json_path: Path | None) -> int:
    try:
        forest = plant(lookups(bench), bench.block_tokens, _cuts(bench))
    except TraceError as error:
        print(f"forebay: {error}", file=sys.stderr)
        return 1
    made = report(rows(bench, forest))
    print(table(made))
    if json_path is not None:
        write_json(made, json_path)
    return 0


def lookups(bench: IndexBench) -> list[Lookup]:
    """The trace's look-ups in order. Policies need full blocks; with "every", Mooncake's partial last blocks count."""
    if weka.is_weka(bench.trace):
        sessions = weka.read(bench.trace, bench.block_tokens)
        visits = weka.lanes(sessions, bench.lanes, bench.seconds) if bench.lanes else _in_turn(sessions)
        return [_of_call(visit) for visit in visits]
    if bench.lanes:
        raise TraceError(f"{bench.trace}: lanes need sessions in the weka form")
    if bench.block_tokens != BLOCK_TOKENS:
        raise TraceError(f"{bench.trace}: its blocks have {BLOCK_TOKENS} tokens")
    return [_of_request(request, full_only=bench.checkpoints != EVERY) for request in read(bench.trace)]


def rows(bench: IndexBench, forest: Forest) -> Iterator[Row]:
    """The figures; where the capacity is bounded, beside those of an eviction that knows the future."""
    every, counted = tallies(bench, forest, bench.evict)
    best = None
    if bench.evict != "optimal" and (bench.capacity_tokens is not None or bench.capacity_bytes is not None):
        best_every, best = tallies(bench, forest, "optimal")
        assert _most(bench, forest, best_every) >= every.hit_blocks, "no order hits more than the optimal one"
    yield Row(name="requests counted", value=counted.requests, unit="requests")
    yield Row(name="input tokens counted", value=counted.tokens, unit="tokens")
    yield Row(name="blocks counted", value=counted.blocks, unit="blocks")
    yield Row(name="blocks hit", value=counted.hit_blocks, unit="blocks")
    yield Row(name="distinct blocks", value=sum(forest.n_blocks), unit="blocks")
    for name, of in _RATES:
        reference = None if best is None else Reference(name="optimal", value=round(of(best), 6))
        yield Row(name=f"{name} hit rate, {bench.evict}", value=round(of(counted), 6), unit="", reference=reference)


def tallies(bench: IndexBench, forest: Forest, evict: Evict) -> tuple[Tally, Tally]:
    """Of all look-ups, and of those from `warm_s` on."""
    every, counted = Tally(), Tally()
    for access, hit_blocks in zip(forest.accesses, _hits(bench, forest, evict), strict=True):
        every.add(access, hit_blocks, forest.block_tokens)
        if access.at >= bench.warm_s:
            counted.add(access, hit_blocks, forest.block_tokens)
    return every, counted


def _most(bench: IndexBench, forest: Forest, best: Tally) -> int:
    """What no order of eviction exceeds, in blocks: the optimal one's. Where checkpoints are charged, the optimal one's
    of rows alone in as many bytes: a checkpoint takes room and never makes a hit longer."""
    if bench.checkpoints == EVERY:
        return best.hit_blocks
    charge = charged(bench)
    assert charge.capacity_bytes is not None
    return sum(optimal(forest, charge.capacity_bytes // charge.block_bytes))


def _hits(bench: IndexBench, forest: Forest, evict: Evict) -> Iterable[int]:
    charge = charged(bench)
    if bench.checkpoints != EVERY:
        return states(forest, bench.checkpoints, charge, COST, evict)
    if bench.capacity_tokens is None or evict == "lru":
        capacity = None if bench.capacity_tokens is None else bench.capacity_tokens // bench.block_tokens
        return lru(forest, capacity)
    if evict == "optimal":
        return optimal(forest, bench.capacity_tokens // bench.block_tokens)
    return forebay(forest, bench.capacity_tokens // bench.block_tokens, charge.block_bytes, COST)


def charged(bench: IndexBench) -> Charge:
    """What things weigh at the shape: rows and index keys of a block, all KDA layers' states of a checkpoint."""
    shape = SHAPES[bench.shape]
    row_bytes = len(shape.global_layers) * (latent_row_bytes(shape) + (index_row_bytes(shape) or 0))
    if bench.capacity_tokens is not None:
        return Charge(
            capacity_bytes=bench.capacity_tokens * row_bytes,
            block_bytes=bench.block_tokens * row_bytes,
            state_bytes=0,
        )
    return Charge(
        capacity_bytes=bench.capacity_bytes,
        block_bytes=bench.block_tokens * row_bytes,
        state_bytes=len(shape.kda_layers) * state_bytes(shape),
    )


def _cuts(bench: IndexBench) -> Callable[[Lookup], Sequence[int]]:
    return (lambda _: ()) if bench.checkpoints == EVERY else cuts(bench.checkpoints, bench.block_tokens)


def _in_turn(sessions: Sequence[weka.Session]) -> Iterator[weka.Visit]:
    """One session after another, each at its own pace."""
    start_s = 0.0
    for session in sessions:
        first_s = session.calls[0].at_s
        for call in session.calls:
            yield weka.Visit(at_s=start_s + call.at_s - first_s, session=session.id, call=call)
        start_s += session.calls[-1].at_s - first_s + BETWEEN_SESSIONS_S


def _of_call(visit: weka.Visit) -> Lookup:
    return Lookup(
        at=visit.at_s,
        scope=visit.session,
        blocks=visit.call.blocks,
        input_tokens=visit.call.input_tokens,
        session=visit.session,
        stop=visit.call.stop,
    )


def _of_request(request: Request, *, full_only: bool) -> Lookup:
    ids = request.hash_ids[: request.input_tokens // BLOCK_TOKENS] if full_only else request.hash_ids
    return Lookup(
        at=request.timestamp_ms / 1000,
        scope=None,
        blocks=np.array(ids, np.int64),
        input_tokens=request.input_tokens,
        session=request.session,
    )


_RATES: tuple[tuple[str, Callable[[Tally], float]], ...] = (
    ("block", lambda tally: tally.by_block),
    ("token", lambda tally: tally.by_token),
)

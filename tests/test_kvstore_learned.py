"""The running store's eviction learns from whose use it was: against the index's own learning, and by what it hits."""

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from forebay.cluster.bench_index import IndexBench, lookups
from forebay.kvstore.chain import Chain
from forebay.kvstore.config import StoreConfig
from forebay.kvstore.forest import Lookup, plant
from forebay.kvstore.history import History
from forebay.kvstore.index import Span
from forebay.kvstore.index_replay import Tally, states
from forebay.kvstore.index_states import Charge, cuts
from forebay.kvstore.layout import make_layout
from forebay.kvstore.policy import PrefillCost
from forebay.kvstore.store import Refusal, Store
from forebay.kvstore.turn import Stop, Turn
from forebay.kvstore.uses import Uses
from tests.kvstore_twin import OWNER

SESSIONS = Path(__file__).resolve().parents[1].parent / "shared" / "traces" / "cc-weka"
recorded = pytest.mark.skipif(not SESSIONS.exists(), reason="needs the recorded traces of ../shared")

BLOCK = 512
POLICY = "prompt_end+junction"
LAYOUT = make_layout(
    block_tokens=BLOCK,
    global_layers=(1,),
    kda_layers=(0,),
    latent_row_bytes=8,
    index_row_bytes=None,
    state_bytes=BLOCK * 8,
)
"""One page holds a block's rows, or a checkpoint."""


def key(scope: object, name: int) -> bytes:
    return blake2b(f"{scope} {name}".encode(), digest_size=32).digest()


def config(pages: int) -> StoreConfig:
    return StoreConfig(device_bytes=pages * LAYOUT.page_bytes, run_dir="", checkpoints=POLICY)


def replay(load: Sequence[Lookup], pages: int, *, learned: bool) -> Iterator[tuple[Lookup, int]]:
    """Every look-up as a request of the real store, one after another, with the tokens that it hit."""
    store = Store(LAYOUT, config(pages), "twin")
    for lookup in load:
        chain = Chain(fingerprint="twin", keys=tuple(key(lookup.scope, name) for name in lookup.blocks.tolist()))
        n_prompt = max(lookup.input_tokens, len(lookup.blocks) * BLOCK)
        turn = Turn(session=lookup.session or "", now=lookup.at) if learned else None
        lease = store.open(OWNER, chain, n_prompt=n_prompt, capacity_tokens=n_prompt, turn=turn)
        assert not isinstance(lease, Refusal)
        with lease:
            lease.ready()
            yield lookup, lease.hit_tokens
            for end in (*lease.checkpoints, n_prompt):
                lease.commit(end)
                lease.ready()
                if end in lease.checkpoints:
                    lease.checkpoint(end)
                    lease.ready()
        if learned:
            store.turn_ended(lookup.session or "", _stop(lookup.stop))
    store.check()


def _stop(text: str) -> Stop:
    return "tool_use" if text == "tool_use" else "end_turn" if text == "end_turn" else ""


def token_rate(hits: Iterator[tuple[Lookup, int]], warm_s: float) -> float:
    counted = [(lookup.input_tokens, hit) for lookup, hit in hits if lookup.at >= warm_s]
    return sum(hit for _, hit in counted) / sum(tokens for tokens, _ in counted)


def index_rate(load: Sequence[Lookup], pages: int, evict: str, warm_s: float) -> float:
    forest = plant(load, BLOCK, cuts(POLICY, BLOCK))
    charge = Charge(
        capacity_bytes=pages * LAYOUT.page_bytes, block_bytes=LAYOUT.page_bytes, state_bytes=LAYOUT.page_bytes
    )
    tally = Tally()
    hits = states(forest, POLICY, charge, config(pages).cost, evict)  # type: ignore[arg-type]
    for access, hit in zip(forest.accesses, hits, strict=True):
        if access.at >= warm_s:
            tally.add(access, hit, BLOCK)
    return tally.by_token


@recorded
def test_on_recorded_agents_it_hits_more_than_recency_does() -> None:
    bench = IndexBench(trace=SESSIONS / "claude_code_sessions.jsonl.gz", lanes=16, seconds=1200.0)
    load, pages, warm_s = lookups(bench), 1600, 300.0
    by_recency = token_rate(replay(load, pages, learned=False), warm_s)
    by_learning = token_rate(replay(load, pages, learned=True), warm_s)
    index = {evict: index_rate(load, pages, evict, warm_s) for evict in ("lru", "forebay", "optimal")}
    print(f"\nrunning store: recency {by_recency:.4f}, learned {by_learning:.4f}; the index alone: {index}")
    assert by_learning > 1.2 * by_recency
    assert by_learning > index["lru"]


def test_it_learns_which_sessions_come_back() -> None:
    """Talkers come back every 10 s; visitors, in between, never: recency keeps the visitors, who came last."""

    def load() -> Iterator[Lookup]:
        for second in range(1600):
            who = f"talker {second % 10}" if second % 10 < 3 else f"visitor {second}"
            turn = second // 10
            names = np.arange(20 + turn % 8 if who.startswith("talker") else 30, dtype=np.int64)
            stop = "tool_use" if who.startswith("talker") else "end_turn"
            yield Lookup(
                at=float(second), scope=who, blocks=names, input_tokens=len(names) * BLOCK + 1, session=who, stop=stop
            )

    given_load = list(load())
    by_recency = token_rate(replay(given_load, 150, learned=False), 800.0)
    by_learning = token_rate(replay(given_load, 150, learned=True), 800.0)
    print(f"\nrecency {by_recency:.4f}, learned {by_learning:.4f}")
    assert by_learning > by_recency + 0.1


@st.composite
def loads(draw: st.DrawFn) -> list[Lookup]:
    """Prompts of a few sessions that extend, repeat or leave earlier ones."""
    at, made = 0.0, []
    for _ in range(draw(st.integers(1, 30))):
        at += draw(st.sampled_from([0.0, 1.0, 9.0, 200.0]))
        session, length = draw(st.integers(0, 2)), draw(st.integers(1, 8))
        branch = draw(st.integers(0, 1)) * 100
        blocks = np.array([*range(min(3, length)), *range(branch + 3, branch + length)], np.int64)
        stop = draw(st.sampled_from(["tool_use", "end_turn", ""]))
        made.append(
            Lookup(
                at=at,
                scope=0,
                blocks=blocks,
                input_tokens=len(blocks) * BLOCK,
                session=None if session == 2 else str(session),
                stop=stop,
            )
        )
    return made


def test_what_it_expects_of_blocks_is_what_the_index_expects(examples: Callable[[int], int]) -> None:
    """The same densities as `Uses` has, which goes by nodes and is told at once how a turn ends."""

    @settings(max_examples=examples(300))
    @given(loads())
    def check(load: list[Lookup]) -> None:
        forest = plant(load, BLOCK)
        uses, history = Uses(forest, PrefillCost(token_s=1.0, pair_s=0.0)), History(1000)
        for lookup, access in zip(load, forest.accesses, strict=True):
            uses.use(access)
            keys = [key(0, name) for name in lookup.blocks.tolist()]
            history.use(Turn(session=lookup.session or "", now=lookup.at), keys)
            if lookup.session is not None:
                history.ended(lookup.session, _stop(lookup.stop))
            elif lookup.stop:
                return  # nobody can say how the turn of an unknown session ended
            last = uses.extent_of[access.path[-1]]
            assert last is not None
            expected = uses.densities(np.array([last]))[0]
            span = Span(pages=np.zeros(1, np.int32), group="latent", first_block=0, parent=None, keys=keys)
            assert history.densities([span], 0)[0] == pytest.approx(expected)

    check()


def test_what_was_never_stored_here_since_another_cluster_served_it_is_told_apart() -> None:
    store = Store(LAYOUT, config(20), "twin")
    chain = store.chain(list(range(3 * BLOCK)))
    for moved, stored, why in ((True, False, "wrong_cluster"), (False, True, "never_stored"), (True, False, None)):
        turn = Turn(session="a", moved=moved, now=1.0)
        lease = store.open(OWNER, chain, n_prompt=3 * BLOCK, capacity_tokens=3 * BLOCK, turn=turn)
        assert not isinstance(lease, Refusal)
        with lease:
            lease.ready()
            assert lease.hit.miss == why
            if stored:
                lease.commit(2 * BLOCK)
                lease.ready()
                lease.checkpoint(2 * BLOCK)
                lease.ready()
    assert store.stats().misses == {"wrong_cluster": 1, "never_stored": 1}


def test_where_no_turn_is_told_a_density_is_recency_alone() -> None:
    span = Span(pages=np.zeros(1, np.int32), group="latent", first_block=0, parent=None, keys=[b"a"], tick=3)
    assert History(10).densities([span], 7).tolist() == [1 / 5]


def test_it_remembers_so_many_blocks_and_no_more() -> None:
    history = History(10)
    for number in range(100):
        history.use(Turn(session="a", now=float(number)), [b"%d %d" % (number, block) for block in range(4)])
        history.use_state(Turn(session="a", now=float(number)), b"%d 3" % number, passed=False)
    assert len(history._row_parts) == len(history._state_parts) == 10
    assert sum(part.stay.blocks for part in {id(p): p for p in history._row_parts.values()}.values()) == 10


def test_what_only_an_ended_session_used_goes_first_and_what_others_use_stays() -> None:
    """`a` and `b` share two blocks; `a`, the latest, ends: under pressure its own blocks go, and `b` keeps all."""
    shared = list(range(2 * BLOCK))
    prompts = {name: [*shared, *([mark] * (4 * BLOCK + 1))] for name, mark in (("b", 1), ("a", 2))}
    for ends in (False, True):
        store = Store(LAYOUT, config(18), "twin")
        for now, (name, ids) in enumerate(prompts.items()):
            _serve(store, name, ids, float(now))
        if ends:
            store.end_session("a")
            store.end_session("a")
        _serve(store, "c", [3] * (5 * BLOCK + 1), 2.0)
        left = {name: store.lookup(store.chain(ids), len(ids)).tokens for name, ids in prompts.items()}
        assert (left["b"] == 6 * BLOCK) == ends, left
        assert (left["a"] == 6 * BLOCK) != ends, left
        store.check()


def test_a_session_that_goes_on_after_its_end_is_as_any_other() -> None:
    history = History(100)
    span = Span(pages=np.zeros(1, np.int32), group="latent", first_block=0, parent=None, keys=[b"x"])
    history.use(Turn(session="a", now=1.0), [b"x"])
    history.end_session("a")
    assert history.densities([span], 0)[0] == 0.0
    history.use(Turn(session="a", now=2.0), [b"x"])
    assert history.densities([span], 0)[0] > 0.0
    history.use(Turn(session="b", now=3.0), [b"x"])
    history.end_session("b")
    history.end_session("a")
    assert history.densities([span], 0)[0] > 0.0


def _serve(store: Store, session: str, ids: list[int], now: float) -> None:
    turn = Turn(session=session, now=now)
    lease = store.open(OWNER, store.chain(ids), n_prompt=len(ids), capacity_tokens=len(ids), turn=turn)
    assert not isinstance(lease, Refusal)
    with lease:
        lease.ready()
        for end in (*lease.checkpoints, len(ids)):
            lease.commit(end)
            lease.ready()
            if end in lease.checkpoints:
                lease.checkpoint(end)
                lease.ready()

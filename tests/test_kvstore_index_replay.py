"""The index on recorded loads, node by node, against twins that go block by block."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import accumulate

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from forebay.kvstore.forest import Forest, Lookup, plant
from forebay.kvstore.index_cache import Densest, IndexCache, Lru
from forebay.kvstore.index_replay import STATE_ORDERS, Lead, Tally, forebay, lru, optimal, states
from forebay.kvstore.index_states import Charge, StateCache, StateOrder, cuts
from forebay.kvstore.policy import PrefillCost, checkpoints_for
from forebay.kvstore.uses import Uses

BLOCK = 4
COST = PrefillCost(token_s=1e-3, pair_s=1e-6)
POLICIES = ("prompt_end", "interval:8", "prompt_end+interval:12")
Load = list[Lookup]


@st.composite
def loads(draw: st.DrawFn) -> Load:
    """Prompts that extend, branch off or repeat earlier ones, of a few sessions; some end within a block."""
    names: dict[tuple[int, ...], int] = {}
    earlier: dict[int, list[tuple[int, ...]]] = {0: [()], 1: [()], 2: [()]}
    lookups, at = [], 0.0
    for _ in range(draw(st.integers(1, 25))):
        session = draw(st.integers(0, 2))
        base = draw(st.sampled_from(earlier[session]))
        kept = draw(st.integers(0, len(base)))
        fresh = draw(st.lists(st.integers(0, 1), max_size=6))
        prompt = (*base[:kept], *fresh)
        earlier[session].append(prompt)
        ids = [names.setdefault((session, *prompt[: end + 1]), len(names)) for end in range(len(prompt))]
        at += draw(st.sampled_from([0.0, 1.0, 7.0, 300.0]))
        lookups.append(
            Lookup(
                at=at,
                scope=session % 2,
                blocks=np.array(ids, np.int64),
                input_tokens=len(prompt) * BLOCK + draw(st.integers(1, BLOCK - 1)),
                session=None if session == 2 else str(session),
                stop=draw(st.sampled_from(["tool_use", "end_turn", ""])),
            )
        )
    return lookups


def keys(lookup: Lookup) -> list[tuple[int, int]]:
    return [(int(str(lookup.scope)), int(name)) for name in lookup.blocks]


def block_lru(load: Load, capacity: int) -> Iterator[int]:
    """Touches from the last block to the first, then eviction from the old end."""
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    for lookup in load:
        blocks = keys(lookup)
        yield next((i for i, block in enumerate(blocks) if block not in cache), len(blocks))
        for block in reversed(blocks):
            cache.pop(block, None)
            cache[block] = None
        while len(cache) > capacity:
            cache.popitem(last=False)


def block_optimal(load: Load, capacity: int) -> Iterator[int]:
    """Evicts one block at a time: used again latest, and of those the deepest."""
    cache: dict[tuple[int, int], int] = {}
    for number, lookup in enumerate(load):
        blocks = keys(lookup)
        yield next((i for i, block in enumerate(blocks) if block not in cache), len(blocks))
        cache.update({block: depth for depth, block in enumerate(blocks)})
        following = {}
        for later in range(len(load) - 1, number, -1):
            following.update(dict.fromkeys(keys(load[later]), later))
        while len(cache) > capacity:
            del cache[max(cache, key=lambda block: (following.get(block, len(load)), cache[block]))]


@given(loads(), st.integers(0, 30))
def test_lru_equals_its_twin(load: Load, capacity: int) -> None:
    forest = plant(load, BLOCK)
    assert list(lru(forest, capacity)) == list(block_lru(load, capacity))
    assert list(lru(forest, None)) == list(block_lru(load, 10**6))


@given(loads(), st.integers(0, 30))
def test_optimal_equals_its_twin(load: Load, capacity: int) -> None:
    assert list(optimal(plant(load, BLOCK), capacity)) == list(block_optimal(load, capacity))


@given(loads(), st.integers(0, 30))
def test_nothing_hits_more_than_the_optimal_at_any_time(load: Load, capacity: int) -> None:
    forest = plant(load, BLOCK)
    best = list(accumulate(optimal(forest, capacity)))
    for other in (lru(forest, capacity), forebay(forest, capacity, 100, COST)):
        assert all(ours <= most for ours, most in zip(accumulate(other), best, strict=True))


@given(loads(), st.integers(0, 30))
def test_a_cache_adds_up_and_never_keeps_a_tail_without_its_root(load: Load, capacity: int) -> None:
    forest = plant(load, BLOCK)
    uses = Uses(forest, COST)
    caches = [IndexCache(uses, capacity, order) for order in (Lru(), Densest(100))]
    for access in forest.accesses:
        for cache in caches:
            cache.take(access.path)
        parts = uses.use(access)
        for cache in caches:
            cache.put(parts)
            cache.check()


@given(loads())
def test_nodes_spell_the_blocks_of_every_prompt(load: Load) -> None:
    forest = plant(load, BLOCK, cuts("interval:8", BLOCK))
    spelled: dict[int, list[tuple[int, int]]] = {}
    for lookup, access in zip(load, forest.accesses, strict=True):
        blocks, end = keys(lookup), 0
        assert sum(forest.n_blocks[node] for node in access.path) == len(blocks) == access.n_blocks
        for before, node in zip((-1, *access.path), access.path, strict=False):
            assert forest.parents[node] == before
            start, end = end, end + forest.n_blocks[node]
            assert forest.ends[node] == end
            assert spelled.setdefault(node, blocks[start:end]) == blocks[start:end]
    assert sum(forest.n_blocks) == len({block for lookup in load for block in keys(lookup)})


def block_states(load: Load, policy: str) -> Iterator[int]:
    """No bound: rows of every block seen, states where the policy kept them."""
    rows: set[tuple[int, int]] = set()
    kept: set[tuple[int, int]] = set()
    for lookup in load:
        blocks = keys(lookup)
        hit = next((i for i, block in enumerate(blocks) if block not in rows), len(blocks))
        while hit and blocks[hit - 1] not in kept:
            hit -= 1
        yield hit
        rows.update(blocks)
        for at in checkpoints_for(policy, n_prompt=lookup.input_tokens, hit_tokens=hit * BLOCK, block_tokens=BLOCK):
            kept.add(blocks[at // BLOCK - 1])


@given(loads(), st.sampled_from(POLICIES))
def test_states_without_a_bound_equal_their_twin(load: Load, policy: str) -> None:
    forest = plant(load, BLOCK, cuts(policy, BLOCK))
    charge = Charge(capacity_bytes=None, block_bytes=10, state_bytes=35)
    assert list(states(forest, policy, charge, COST, "lru")) == list(block_states(load, policy))


def block_states_lru(load: Load, policy: str, charge: Charge) -> Iterator[int]:
    """Least recent use first; of one use the checkpoints, then the rows from the last on."""
    rows: dict[tuple[int, int], tuple[int, int, int]] = {}
    kept: dict[tuple[int, int], tuple[int, int, int]] = {}
    paths: dict[tuple[int, int], list[tuple[int, int]]] = {}
    assert charge.capacity_bytes is not None
    for number, lookup in enumerate(load):
        blocks = keys(lookup)
        paths.update({block: blocks[: end + 1] for end, block in enumerate(blocks)})
        hit = next((i for i, block in enumerate(blocks) if block not in rows), len(blocks))
        while hit and blocks[hit - 1] not in kept:
            hit -= 1
        yield hit
        rows.update({block: (number, 1, -depth) for depth, block in enumerate(blocks)})
        wanted = checkpoints_for(policy, n_prompt=lookup.input_tokens, hit_tokens=hit * BLOCK, block_tokens=BLOCK)
        kept.update({blocks[at // BLOCK - 1]: (number, 0, 0) for at in (*wanted, *([hit * BLOCK] if hit else []))})
        while len(rows) * charge.block_bytes + len(kept) * charge.state_bytes > charge.capacity_bytes:
            oldest = min([*rows.values(), *kept.values()])
            if any(used == oldest for used in kept.values()):
                del kept[next(block for block, used in kept.items() if used == oldest)]
            else:
                del rows[next(block for block, used in rows.items() if used == oldest)]
                for block in [block for block in kept if any(each not in rows for each in paths[block])]:
                    del kept[block]


@given(loads(), st.integers(0, 300))
def test_states_under_lru_equal_their_twin(load: Load, capacity: int) -> None:
    """Prompts end within a block and the interval is long, so one use keeps or renews one checkpoint or a chain."""
    charge = Charge(capacity_bytes=capacity, block_bytes=10, state_bytes=35)
    forest = plant(load, BLOCK, cuts("prompt_end", BLOCK))
    ours = list(states(forest, "prompt_end", charge, COST, "lru"))
    assert ours == list(block_states_lru(load, "prompt_end", charge))


@pytest.mark.parametrize("order", [*STATE_ORDERS, "optimal"])
def test_charged_states_add_up(order: StateOrder, examples: Callable[[int], int]) -> None:
    @settings(max_examples=examples(500))
    @given(loads(), st.integers(0, 300), st.sampled_from([*POLICIES, "prompt_end+junction"]))
    def check(load: Load, capacity: int, policy: str) -> None:
        forest = plant(load, BLOCK, cuts(policy, BLOCK))
        uses = Uses(forest, COST)
        charge = Charge(capacity_bytes=capacity, block_bytes=10, state_bytes=35)
        cache = StateCache(uses, policy, charge, COST, order)
        for access in forest.accesses:
            hit = cache.hit(access.path)
            assert hit <= access.n_blocks
            cache.take(access)
            cache.put(access, uses.use(access), [9] * len(access.path), lambda node: node % 3)
            assert cache.held_bytes <= capacity
            cache.check()

    check()


def rounds(sessions: int, blocks: int, turns: int, pauses: tuple[float, ...]) -> Forest:
    """Sessions that grow by a block a turn; session i pauses pauses[i % len] seconds."""
    load = [
        Lookup(
            at=session + turn * pauses[session % len(pauses)],
            scope=session,
            blocks=np.arange(blocks + turn),
            input_tokens=(blocks + turn) * BLOCK + 1,
            session=str(session),
            stop="tool_use",
        )
        for session in range(sessions)
        for turn in range(turns)
    ]
    return plant(sorted(load, key=lambda lookup: lookup.at), BLOCK)


def tally(forest: Forest, hits: Iterator[int]) -> Tally:
    made = Tally()
    for access, hit in zip(forest.accesses, hits, strict=True):
        made.add(access, hit, BLOCK)
    return made


def test_rounds_that_do_not_fit_thrash_under_lru_and_not_under_worth() -> None:
    forest = rounds(sessions=16, blocks=40, turns=120, pauses=(20.0, 60.0))
    capacity = 16 * 100 // 2
    plain, ours, best = (
        tally(forest, hits).by_block
        for hits in (lru(forest, capacity), forebay(forest, capacity, 100, COST), optimal(forest, capacity))
    )
    assert plain < 0.45 < 0.6 < ours <= best


def test_where_all_fits_worth_is_lru() -> None:
    forest = rounds(sessions=4, blocks=10, turns=20, pauses=(5.0,))
    assert list(forebay(forest, 4 * 30, 100, COST)) == list(lru(forest, None))


def test_a_challenger_has_to_prove_itself() -> None:
    lead = Lead()
    for _ in range(100):
        lead.add(1000, 1000, 10_000)
    assert not lead.leads
    lead.add(9000, 1000, 10_000)
    assert not lead.leads, "less than a hundredth ahead"
    lead.add(9000, 1000, 10_000)
    assert lead.leads
    lead.add(0, 9000, 10_000)
    assert lead.leads, "still ahead"
    lead.add(0, 9000, 10_000)
    assert not lead.leads

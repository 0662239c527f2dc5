"""A recorded load against the index alone: what a cache of some capacity would have hit under some order of eviction.

Look-ups come one at a time, each with all of its blocks cached before the next; answers are not cached.
"""

import heapq
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from forebay.kvstore.forest import Access, Forest
from forebay.kvstore.index_cache import Densest, IndexCache, Lru
from forebay.kvstore.index_states import Charge, StateCache, StateOrder
from forebay.kvstore.policy import PrefillCost
from forebay.kvstore.uses import Uses

LEAD_SHARE = 0.01
"""Of what was looked up: so far ahead the eviction by worth has to be of LRU to take over. Where nearly all fits, LRU
is nearly optimal, and what is learned of long stays is noise (16 lanes at 3.25 M: LRU .9425, worth alone .9385)."""
LEAD_MEMORY = 10_000
"""Look-ups that the lead reaches back, by exponential decay. With 2,000 it was lost again on a chat trace (at 1,000
blocks .0829, LRU .0841)."""
STATE_ORDERS: tuple[StateOrder, StateOrder] = ("worth", "lru")


@dataclass(slots=True, kw_only=True)
class Tally:
    """What was looked up and hit. Rates weigh blocks and tokens, not requests."""

    requests: int = 0
    hit_blocks: int = 0
    blocks: int = 0
    hit_tokens: int = 0
    tokens: int = 0

    def add(self, access: Access, hit_blocks: int, block_tokens: int) -> None:
        self.requests += 1
        self.hit_blocks += hit_blocks
        self.blocks += access.n_blocks
        self.hit_tokens += min(hit_blocks * block_tokens, access.input_tokens)
        self.tokens += access.input_tokens

    @property
    def by_block(self) -> float:
        return self.hit_blocks / self.blocks if self.blocks else 0.0

    @property
    def by_token(self) -> float:
        return self.hit_tokens / self.tokens if self.tokens else 0.0


def lru(forest: Forest, capacity_blocks: int | None) -> Iterator[int]:
    """Blocks hit by each access, under plain LRU."""
    uses = Uses(forest, PrefillCost(token_s=0.0, pair_s=0.0))
    cache = IndexCache(uses, capacity_blocks, Lru())
    for access in forest.accesses:
        yield cache.hit(access.path)
        cache.take(access.path)
        cache.put(uses.use(access))


def forebay(forest: Forest, capacity_blocks: int, block_bytes: int, cost: PrefillCost) -> Iterator[int]:
    """The same under the store's own eviction.

    Two ghosts, names without bytes, follow along: one evicts by worth, the other the longest unused. The cache does as
    the first while that one has proved to be ahead.
    """
    uses = Uses(forest, cost)
    orders = Densest(block_bytes), Lru()
    ghosts = [IndexCache(uses, capacity_blocks, order) for order in orders]
    cache = IndexCache(uses, capacity_blocks, orders[1])
    lead = Lead()
    for access in forest.accesses:
        hit = cache.hit(access.path)
        lead.add(ghosts[0].hit(access.path), ghosts[1].hit(access.path), access.n_blocks)
        cache.order = orders[0] if lead.leads else orders[1]
        for each in (*ghosts, cache):
            each.take(access.path)
        parts = uses.use(access)
        for each in (*ghosts, cache):
            each.put(parts)
        yield hit


class Lead:
    """Whether a challenger is ahead of the incumbent, of late: by a hundredth of what was looked up to take over, by
    anything to stay."""

    def __init__(self) -> None:
        self.leads = False
        self._ahead = 0.0
        self._looked_up = 0.0

    def add(self, challenger: int, incumbent: int, blocks: int) -> None:
        keep = 1 - 1 / LEAD_MEMORY
        self._ahead = self._ahead * keep + challenger - incumbent
        self._looked_up = self._looked_up * keep + blocks
        self.leads = self._ahead > (0 if self.leads else LEAD_SHARE * self._looked_up)


def optimal(forest: Forest, capacity_blocks: int) -> Iterator[int]:
    """The same with the future known: the blocks used again latest go first (Belady 1966).

    A prefix is used whenever what follows it is, so among blocks used again equally late the deepest goes first, and
    no block outlives its root: what is hit is then the most that any order could, counted from the first access on.
    """
    next_use = next_uses(forest)
    present = [0] * len(forest.n_blocks)
    latest: list[tuple[int, int, int]] = []
    due = [0] * len(forest.n_blocks)
    held = 0
    for access, nexts in zip(forest.accesses, next_use, strict=True):
        yield _run(forest, present, access)
        for depth, (node, use) in enumerate(zip(access.path, nexts, strict=True)):
            held += forest.n_blocks[node] - present[node]
            present[node], due[node] = forest.n_blocks[node], use
            heapq.heappush(latest, (-use, -depth, node))
        while held > capacity_blocks:
            use, _, node = latest[0]
            if due[node] != -use or not present[node]:
                heapq.heappop(latest)
                continue
            cut = min(present[node], held - capacity_blocks)
            present[node] -= cut
            held -= cut


def states(
    forest: Forest, policy: str, charge: Charge, cost: PrefillCost, evict: Literal["lru", "forebay", "optimal"]
) -> Iterator[int]:
    """Blocks hit by each access where a hit has to end at a checkpoint, and checkpoints are charged."""
    if evict == "optimal":
        return _states_optimal(forest, policy, charge, cost)
    if evict == "forebay" and charge.capacity_bytes is not None:
        return _states_forebay(forest, policy, charge, cost)
    return (hit for hit, _ in _states_lru(forest, policy, charge, cost))


def _states_lru(forest: Forest, policy: str, charge: Charge, cost: PrefillCost) -> Iterator[tuple[int, int | None]]:
    """Hits, and the nodes whose checkpoints were restored."""
    uses = Uses(forest, cost)
    cache = StateCache(uses, policy, charge, cost, "lru")
    for access in forest.accesses:
        yield cache.hit(access.path), cache.restored
        cache.take(access)
        cache.put(access, uses.use(access))


def _states_forebay(forest: Forest, policy: str, charge: Charge, cost: PrefillCost) -> Iterator[int]:
    uses = Uses(forest, cost)
    ghosts = [StateCache(uses, policy, charge, cost, order) for order in STATE_ORDERS]
    cache = StateCache(uses, policy, charge, cost, "lru")
    lead = Lead()
    for access in forest.accesses:
        hit = cache.hit(access.path)
        lead.add(ghosts[0].hit(access.path), ghosts[1].hit(access.path), access.n_blocks)
        cache.order = STATE_ORDERS[0 if lead.leads else 1]
        for each in (*ghosts, cache):
            each.take(access)
        parts = uses.use(access)
        for each in (*ghosts, cache):
            each.put(access, parts)
        yield hit


def _states_optimal(forest: Forest, policy: str, charge: Charge, cost: PrefillCost) -> Iterator[int]:
    """What will be used latest goes first, a checkpoint being used when a cache without bounds would restore it.

    Not proved to be the most that can be hit: units differ in size, and a bounded cache may resume elsewhere.
    """
    unbounded = replace(charge, capacity_bytes=None)
    never = len(forest.accesses)
    restores: dict[int, list[int]] = {}
    for number, (_, node) in enumerate(_states_lru(forest, policy, unbounded, cost)):
        if node is not None:
            restores.setdefault(node, []).append(number)
    uses = Uses(forest, cost)
    cache = StateCache(uses, policy, charge, cost, "optimal")

    for number, (access, nexts) in enumerate(zip(forest.accesses, next_uses(forest), strict=True)):

        def next_restore(node: int, after: int = number) -> int:
            known = restores.get(node, [])
            place = bisect_right(known, after)
            return known[place] if place < len(known) else never

        yield cache.hit(access.path)
        cache.take(access)
        cache.put(access, uses.use(access), nexts, next_restore)


def _run(forest: Forest, present: list[int], access: Access) -> int:
    blocks = 0
    for node in access.path:
        blocks += present[node]
        if present[node] < forest.n_blocks[node]:
            break
    return blocks


def next_uses(forest: Forest) -> list[list[int]]:
    """For each access and node of its path, the number of the next access that uses it."""
    never = len(forest.accesses)
    following: dict[int, int] = {}
    found: list[list[int]] = [[]] * never
    for number in range(never - 1, -1, -1):
        path = forest.accesses[number].path
        found[number] = [following.get(node, never) for node in path]
        following.update(dict.fromkeys(path, number))
    return found

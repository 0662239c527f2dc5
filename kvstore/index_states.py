"""The index with recurrent states: a hit ends where a checkpoint is, and checkpoints take bytes beside the rows.

Checkpoints lie at ends of nodes: where the policy wants them in any prompt, and where prompts part. A cut that an
eviction made in the middle of a node is no junction.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from forebay.kvstore.forest import Access, Lookup
from forebay.kvstore.index_cache import IndexCache, Lru
from forebay.kvstore.policy import PrefillCost, checkpoints_for, worth
from forebay.kvstore.reuse import KINDS, Floats, Ints, Reuse, Stay, state_kind
from forebay.kvstore.uses import Uses

StateOrder = Literal["lru", "worth", "optimal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """What a cache holds at most (None: no bound), and what a block of rows and a checkpoint take of it."""

    capacity_bytes: int | None
    block_bytes: int
    state_bytes: int


def cuts(policy: str, block_tokens: int) -> Callable[[Lookup], Sequence[int]]:
    """Where nodes have to end for the policy (forest.plant)."""

    def of(lookup: Lookup) -> Sequence[int]:
        wanted = checkpoints_for(policy, n_prompt=lookup.input_tokens, hit_tokens=0, block_tokens=block_tokens)
        return [at // block_tokens for at in wanted if at <= len(lookup.blocks) * block_tokens]

    return of


@dataclass(slots=True, kw_only=True)
class Kept:
    """A checkpoint. `before_tokens`: where the nearest one before it on its path was at its
    last use, or that one's own where it is lost (0: none). `made`: the first extent of its last
    use. `due`: the access that will restore it next, where that is known."""

    stay: Stay
    made: int
    before_tokens: int
    due: int


class StateCache:
    """One access: `hit`, `take`, then `Uses.use`, then `put` what it made.

    Rows that no checkpoint needs are worth nothing; a checkpoint whose rows are not all there is dropped.
    """

    def __init__(self, uses: Uses, policy: str, charge: Charge, cost: PrefillCost, order: StateOrder) -> None:
        n_nodes = len(uses.forest.n_blocks)
        self.order = order
        self.restored: int | None = None
        """The node whose checkpoint the last hit resumed from."""
        self._uses = uses
        self._policy = policy
        self._charge = charge
        self._cost = cost
        self._rows = IndexCache(uses, None, Lru())
        self._reuse = Reuse(2 * KINDS)
        self._kept: dict[int, Kept] = {}
        self._wanted: list[int] = []
        self._needed_by: Ints = np.zeros(n_nodes, np.int64)
        self._states_ranked: Floats | None = None
        self._due: Ints = np.zeros(n_nodes, np.int64)

    @property
    def held_bytes(self) -> int:
        return self._rows.held_blocks * self._charge.block_bytes + len(self._kept) * self._charge.state_bytes

    def hit(self, path: Sequence[int]) -> int:
        """Blocks up to the last checkpoint within the rows that are present."""
        run = self._rows.hit(path)
        ends = self._uses.forest.ends
        self.restored = next((node for node in reversed(path) if ends[node] <= run and node in self._kept), None)
        return 0 if self.restored is None else ends[self.restored]

    def take(self, access: Access) -> None:
        """The path that was just looked up is about to be used."""
        block, ends = self._uses.forest.block_tokens, self._uses.forest.ends
        wanted = checkpoints_for(
            self._policy,
            n_prompt=access.input_tokens,
            hit_tokens=0 if self.restored is None else ends[self.restored] * block,
            block_tokens=block,
            branches=[self._rows.hit(access.path) * block],
        )
        self._wanted = [node for node in access.path if ends[node] * block in set(wanted)]
        self._rows.take(access.path)

    def put(
        self,
        access: Access,
        parts: Iterable[tuple[int, Iterable[int]]],
        next_uses: Sequence[int] = (),
        next_restores: Callable[[int], int] = lambda _: 0,
    ) -> None:
        """The path's rows are present and its checkpoints kept; evict down to the capacity.

        `next_uses` of each node of the path and `next_restores` of a node tell the future to the optimal order.
        """
        self._states_ranked = None
        self._rows.put(parts)
        self._keep(access.path, next_restores)
        if next_uses:
            self._due[list(access.path)] = next_uses
        while self._charge.capacity_bytes is not None and self.held_bytes > self._charge.capacity_bytes:
            self._evict(self.held_bytes - self._charge.capacity_bytes)

    def check(self) -> None:
        """Assert that every checkpoint has its rows, and that needs and gaps are counted right."""
        forest = self._uses.forest
        self._rows.check()
        needed = [0] * len(self._needed_by)
        for node, kept in self._kept.items():
            above = self._above(node)
            assert all(self._rows.present(each) == forest.n_blocks[each] for each in above)
            before = {forest.ends[each] * forest.block_tokens for each in above[1:] if each in self._kept}
            assert kept.before_tokens in {0} | before
            for each in above:
                needed[each] += 1
        assert needed == self._needed_by.tolist()

    def _keep(self, path: Sequence[int], next_restores: Callable[[int], int]) -> None:
        used = {*self._wanted, *(() if self.restored is None else (self.restored,))}
        last = max(used, key=self._uses.forest.ends.__getitem__, default=None)
        self._reuse.advance(self._uses.now)
        before_tokens = 0
        for node in path:
            if node in used:
                self._use(node, path[0], passed=node != last, due=next_restores(node))
            if node in self._kept:
                self._kept[node].before_tokens = before_tokens
                before_tokens = self._uses.forest.ends[node] * self._uses.forest.block_tokens

    def _use(self, node: int, root: int, *, passed: bool, due: int) -> None:
        """A checkpoint was made or restored, on a path from this root; `passed`: so was a later one on that path."""
        extent, first = self._uses.extent_of[node], self._uses.extent_of[root]
        assert extent is not None
        assert first is not None
        old = self._kept.get(node)
        if old is None:
            self._count(node, 1)
        else:
            self._reuse.end(old.stay, self._uses.now, 1)
        stay = self._reuse.begin(state_kind(self._uses.kind(extent), passed), self._uses.now, 1)
        self._kept[node] = Kept(stay=stay, made=first, before_tokens=0, due=due)

    def _evict(self, excess_bytes: int) -> None:
        extents = self._rows.alive()
        row_values = self._row_values(extents)
        if self._states_ranked is None:
            self._states_ranked = self._state_values(list(self._kept))
        if len(self._kept) and (not len(extents) or self._states_ranked.min() <= row_values.min()):
            self._drop(list(self._kept)[int(self._states_ranked.argmin())])
            return
        extent, last = self._rows.leaf(int(extents[row_values.argmin()]))
        enough = 1 if last in self._kept else -(-excess_bytes // self._charge.block_bytes)
        self._rows.shrink(extent, min(enough, self._rows.present(last)))
        if last in self._kept:
            self._drop(last)

    def _row_values(self, extents: Ints) -> Floats:
        lasts = self._rows.last_nodes(extents)
        needed = self._needed_by[lasts] > 0
        if self.order == "lru":
            return extents.astype(np.float64)
        if self.order == "optimal":
            return np.where(needed, -self._due[lasts].astype(np.float64), -np.inf)
        value = worth(self._uses.saved_s(extents), self._charge.block_bytes, self._uses.densities(extents))
        return np.where(needed, value, 0.0)

    def _state_values(self, nodes: Sequence[int]) -> Floats:
        kept = [self._kept[node] for node in nodes]
        if self.order == "lru":
            return np.array([each.made - 0.5 for each in kept])
        if self.order == "optimal":
            return np.array([-float(each.due) for each in kept])
        ages = self._uses.now - np.array([each.stay.since for each in kept])
        density = self._reuse.densities(np.array([each.stay.kind for each in kept], np.int64), ages)
        starts = np.array([each.before_tokens for each in kept], np.float64)
        ends = np.array([self._uses.forest.ends[node] for node in nodes], np.float64) * self._uses.forest.block_tokens
        return worth(self._cost.seconds(starts, ends), max(1, self._charge.state_bytes), density)

    def _drop(self, lost: int) -> None:
        """Those after it now save the prefill from the one before it."""
        self._states_ranked = None
        gone = self._kept.pop(lost)
        self._reuse.forget(gone.stay)
        self._count(lost, -1)
        at = self._uses.forest.ends[lost] * self._uses.forest.block_tokens
        for node, kept in self._kept.items():
            if kept.before_tokens == at and lost in self._above(node):
                kept.before_tokens = gone.before_tokens

    def _count(self, node: int, by: int) -> None:
        self._needed_by[self._above(node)] += by

    def _above(self, node: int) -> list[int]:
        """The node and its ancestors, up to the root."""
        found = []
        while node >= 0:
            found.append(node)
            node = self._uses.forest.parents[node]
        return found

"""A cache of block names alone, over a forest: what is present, and the eviction that keeps it within its capacity.

A node is present from its first block on, with all of its ancestors; only its last blocks may be missing. So a prefix
is never left without its root: the tail of whatever is evicted goes first.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from forebay.kvstore.policy import worth
from forebay.kvstore.reuse import USE_LEVELS, Ints
from forebay.kvstore.uses import Uses

FEW = 64
"""So many extents of the least worth are ranked at first: nearly always enough for one eviction."""


class Order(Protocol):
    """Ranks extents (ascending numbers) for eviction, in batches: the first to go first, all of them in the end."""

    def ranked(self, uses: Uses, extents: Ints) -> Iterable[Ints]: ...


class Lru:
    """The longest unused first."""

    def ranked(self, uses: Uses, extents: Ints) -> Iterable[Ints]:
        return (extents,)


class Densest:
    """Seconds of prefill saved per byte and unit of time, least first: policy.worth with what `Uses` has learned."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes

    def ranked(self, uses: Uses, extents: Ints) -> Iterable[Ints]:
        value = worth(uses.saved_s(extents), self._block_bytes, uses.densities(extents))
        if len(extents) > 2 * FEW:
            low = value <= np.partition(value, FEW)[FEW]
            yield extents[low][np.argsort(value[low], kind="stable")]
        yield extents[np.argsort(value, kind="stable")]


class IndexCache:
    """One access: `hit`, `take`, then `Uses.use`, then `put` what it made. Capacity in blocks; None: no bound."""

    def __init__(self, uses: Uses, capacity_blocks: int | None, order: Order) -> None:
        n_nodes = len(uses.forest.n_blocks)
        self.order = order
        self.held_blocks = 0
        self._uses = uses
        self._capacity = capacity_blocks
        self._present = [0] * n_nodes
        self._children: list[dict[int, None]] = [{} for _ in range(n_nodes)]
        self._nodes: dict[int, deque[int]] = {}
        self._alive = np.zeros(len(uses.forest.accesses) * USE_LEVELS, bool)
        self._last: Ints = np.zeros(len(self._alive), np.int64)
        self._oldest = 0

    def hit(self, path: Sequence[int]) -> int:
        """Blocks of the path that are present before the first that is not. Changes nothing."""
        blocks = 0
        for node in path:
            blocks += self._present[node]
            if self._present[node] < self._uses.forest.n_blocks[node]:
                break
        return blocks

    def take(self, path: Sequence[int]) -> None:
        """The path is about to be used: its nodes leave the extents they are in."""
        for node in path:
            extent = self._uses.extent_of[node]
            if self._present[node]:
                assert extent is not None
                assert self._nodes[extent][0] == node, "uses take extents from the top"
                self._nodes[extent].popleft()
                if not self._nodes[extent]:
                    self._drop(extent)

    def put(self, parts: Iterable[tuple[int, Iterable[int]]]) -> None:
        """All nodes of the path are present now, in their new extents; evict down to the capacity."""
        forest = self._uses.forest
        for extent, nodes in parts:
            self._nodes[extent] = deque(nodes)
            self._alive[extent], self._last[extent] = True, self._nodes[extent][-1]
            for node in nodes:
                if not self._present[node] and forest.parents[node] >= 0:
                    self._children[forest.parents[node]][node] = None
                self.held_blocks += forest.n_blocks[node] - self._present[node]
                self._present[node] = forest.n_blocks[node]
        if self._capacity is not None and self.held_blocks > self._capacity:
            self._evict(self._capacity)

    def alive(self) -> Ints:
        """Extents of which anything is present, ascending."""
        extents = np.flatnonzero(self._alive[self._oldest : self._uses.made]) + self._oldest
        self._oldest = int(extents[0]) if len(extents) else self._uses.made
        return extents

    def leaf(self, extent: int) -> tuple[int, int]:
        """An extent that hangs below this one, or itself, with nothing below; and its last node."""
        while self._children[self._nodes[extent][-1]]:
            child = self._uses.extent_of[next(iter(self._children[self._nodes[extent][-1]]))]
            assert child is not None
            extent = child
        return extent, self._nodes[extent][-1]

    def last_nodes(self, extents: Ints) -> Ints:
        return self._last[extents]

    def present(self, node: int) -> int:
        return self._present[node]

    def shrink(self, extent: int, blocks: int) -> None:
        """Take so many blocks from the end of an extent that nothing hangs below, of its last node alone."""
        assert blocks <= self._present[self._nodes[extent][-1]]
        self._cut_node(extent, self._nodes[extent][-1], self.held_blocks - blocks)

    def check(self) -> None:
        """Assert that the counts add up, and that whatever is present has all of its ancestors."""
        forest = self._uses.forest
        assert self.held_blocks == sum(self._present)
        assert self._capacity is None or self.held_blocks <= self._capacity
        for node, blocks in enumerate(self._present):
            parent = forest.parents[node]
            assert not blocks or parent < 0 or self._present[parent] == forest.n_blocks[parent]
            assert not blocks or parent < 0 or node in self._children[parent]
        assert sorted(node for nodes in self._nodes.values() for node in nodes) == [
            node for node, blocks in enumerate(self._present) if blocks
        ]

    def _evict(self, capacity: int) -> None:
        for batch in self.order.ranked(self._uses, self.alive()):
            for extent in batch.tolist():
                self._cut(extent, capacity)
                if self.held_blocks <= capacity:
                    return

    def _cut(self, extent: int, capacity: int) -> None:
        below = [extent]
        while below and self.held_blocks > capacity:
            nodes = self._nodes.get(below[-1])
            if nodes is None:
                below.pop()
            elif self._children[nodes[-1]]:
                child = self._uses.extent_of[next(iter(self._children[nodes[-1]]))]
                assert child is not None
                below.append(child)
            else:
                self._cut_node(below[-1], nodes[-1], capacity)

    def _cut_node(self, extent: int, node: int, capacity: int) -> None:
        cut = min(self._present[node], self.held_blocks - capacity)
        self._present[node] -= cut
        self.held_blocks -= cut
        if self._present[node]:
            return
        if self._uses.forest.parents[node] >= 0:
            del self._children[self._uses.forest.parents[node]][node]
        self._nodes[extent].pop()
        if self._nodes[extent]:
            self._last[extent] = self._nodes[extent][-1]
        else:
            self._drop(extent)

    def _drop(self, extent: int) -> None:
        del self._nodes[extent]
        self._alive[extent] = False

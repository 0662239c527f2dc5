"""Which blocks of a load were last used together: extents, each the lower part of one request's path.

    path of access 7    root ======#====#======#    extents made: by how often their nodes were used
    path of access 9    root ======#====#--         takes the upper nodes out of them; the rest stays as it was

So an extent is a chain of nodes, top first; later uses take nodes from its top, an eviction from its bottom. This is
the part of a cache that is the same whatever it evicts: replays of one load under several orders share it.
"""

from collections import deque

import numpy as np

from forebay.kvstore.forest import Access, Forest
from forebay.kvstore.policy import PrefillCost
from forebay.kvstore.reuse import KINDS, USE_LEVELS, Floats, Gaps, Ints, Reuse, Stay, kind_of


class Uses:
    """`extent_of` node -> its extent, None before its first use. Extents are numbered in the order of their last use;
    among those of one access the one with the root is the first."""

    def __init__(self, forest: Forest, cost: PrefillCost) -> None:
        self.forest = forest
        self.reuse = Reuse(KINDS)
        self.now = 0.0
        self.extent_of: list[int | None] = [None] * len(forest.n_blocks)
        limit = len(forest.accesses) * USE_LEVELS
        self._cost = cost
        self._gaps = Gaps()
        self._uses = [0] * len(forest.n_blocks)
        self._stays: dict[int, Stay] = {}
        self._made = 0
        self._at: Floats = np.zeros(limit)
        self._kind: Ints = np.zeros(limit, np.int64)
        self._saved_s: Floats = np.zeros(limit)

    @property
    def made(self) -> int:
        """Extents so far."""
        return self._made

    def use(self, access: Access) -> list[tuple[int, deque[int]]]:
        """The path's nodes were used now. The new extents with their nodes, top first."""
        self.now = max(self.now, access.at)
        self.reuse.advance(self.now)
        gap = self._gaps.usual(access.session, access.stop, self.now)
        parts: dict[int, deque[int]] = {}
        for node in access.path:
            self._end(node)
            self._uses[node] += 1
            parts.setdefault(kind_of(access.stop, gap, self._uses[node]), deque()).append(node)
        whole = access.session is not None
        return [(self._begin(kind, nodes, whole), nodes) for kind, nodes in parts.items()]

    def kind(self, extent: int) -> int:
        return int(self._kind[extent])

    def densities(self, extents: Ints) -> Floats:
        return self.reuse.densities(self._kind[extents], self.now - self._at[extents])

    def saved_s(self, extents: Ints) -> Floats:
        """Seconds of prefill that the last block of each saves. In a session, whose next turn uses all of it or none,
        that is the mean from the root on: a later block costs more, but is of no use without those before it."""
        return self._saved_s[extents]

    def _end(self, node: int) -> None:
        extent = self.extent_of[node]
        if extent is not None:
            stay = self._stays[extent]
            self.reuse.end(stay, self.now, self.forest.n_blocks[node])
            if not stay.blocks:
                del self._stays[extent]

    def _begin(self, kind: int, nodes: deque[int], whole: bool) -> int:
        extent = self._made
        self._made += 1
        for node in nodes:
            self.extent_of[node] = extent
        self._stays[extent] = self.reuse.begin(kind, self.now, sum(self.forest.n_blocks[node] for node in nodes))
        end, block = self.forest.ends[nodes[-1]], self.forest.block_tokens
        start = 0 if whole else end - 1
        self._at[extent], self._kind[extent] = self.now, kind
        self._saved_s[extent] = self._cost.seconds(float(start * block), float(end * block)) / (end - start)
        return extent

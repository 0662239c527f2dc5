"""The pages of one tier: which are free, how many are leased, how many are cached.

    free --take--> leased --cache--> cached --lease--> leased;  leased or cached --give--> free

`free + leased + cached == total` after every call. Which unit owns a page is `index.py`'s knowledge.
"""

import numpy as np

from forebay.kvstore.moves import Pages


class PagePool:
    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        self.leased = 0
        self.cached = 0
        self._stack = list(range(total - 1, -1, -1))
        self._is_free = bytearray(b"\1" * total)

    def take(self, n: int) -> Pages:
        """`n` free pages, now leased: int32 [n]. The caller made sure that they are there."""
        assert 0 <= n <= self.free, "pages are taken only after room was made"
        self.free -= n
        self.leased += n
        taken = self._stack[self.free :]
        del self._stack[self.free :]
        for page in taken:
            self._is_free[page] = 0
        return np.array(taken, dtype=np.int32)

    def cache(self, n: int) -> None:
        assert n <= self.leased
        self.leased -= n
        self.cached += n

    def lease(self, n: int) -> None:
        assert n <= self.cached
        self.cached -= n
        self.leased += n

    def give(self, pages: Pages, *, cached: bool) -> None:
        """Return pages that were leased, or cached."""
        returned = pages.tolist()
        for page in returned:
            assert not self._is_free[page], "a page is given back once"
            self._is_free[page] = 1
        self._stack += returned
        self.free += len(returned)
        if cached:
            self.cached -= len(returned)
        else:
            self.leased -= len(returned)

    def check(self) -> None:
        assert min(self.free, self.leased, self.cached) >= 0
        assert self.free + self.leased + self.cached == self.total, "no page is lost or made"
        assert sum(self._is_free) == len(self._stack) == self.free
        assert all(self._is_free[page] for page in self._stack)

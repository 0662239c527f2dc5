"""A store and the bytes it accounts for: every call carries out its moves before it returns.

memory.open -> Lease | Refusal      the hit's rows and state are in the lease's pages, verified
memory.commit, checkpoint, grow     as the lease's own calls
"""

import numpy as np
import torch

from forebay.kvstore.arena import Arena
from forebay.kvstore.chain import Chain
from forebay.kvstore.config import StoreConfig
from forebay.kvstore.device import DevicePool
from forebay.kvstore.host import HostPool
from forebay.kvstore.layout import Layout
from forebay.kvstore.lease import Holder, Lease, Refusal
from forebay.kvstore.moves import Move, Pages
from forebay.kvstore.store import Store

RESTORES_MAX = 8
"""Restores of one request that may find wrong bytes before it starts cold."""


class Memory:
    def __init__(self, store: Store, pool: DevicePool, host: HostPool | None) -> None:
        self.store = store
        self.pool = pool
        self.host = host

    def open(self, holder: Holder, chain: Chain | None, *, n_prompt: int, capacity_tokens: int) -> Lease | Refusal:
        """As `Store.open`. Wrong bytes in the host tier are dropped, and the rest of the hit is taken instead."""
        for restores in range(RESTORES_MAX + 1):
            lease = self.store.open(
                holder, chain, n_prompt=n_prompt, capacity_tokens=capacity_tokens, reuse=restores < RESTORES_MAX
            )
            if isinstance(lease, Refusal):
                return lease
            wrong = self._carry_out(lease.moves)
            if not len(wrong):
                lease.ready()
                return lease
            lease.close()
            self.store.drop_corrupt("host", wrong)
        raise AssertionError("a cold start restores nothing")

    def commit(self, lease: Lease, upto_tokens: int) -> None:
        """The rows of all tokens below `upto_tokens` are in the pages: their whole blocks become matchable."""
        lease.commit(upto_tokens)
        self._finish(lease)

    def checkpoint(self, lease: Lease, at_tokens: int) -> Refusal | None:
        """Keep the running state, which stands at `at_tokens`. On a refusal it is not kept, and nothing changes."""
        refusal = lease.checkpoint(at_tokens)
        self._finish(lease)
        return refusal

    def grow(self, lease: Lease, capacity_tokens: int) -> Refusal | None:
        """Pages for more tokens: `lease.pages` is replaced."""
        refusal = lease.grow(capacity_tokens)
        self._finish(lease)
        return refusal

    def close(self) -> None:
        """Remove the host tier's file."""
        if self.host is not None:
            self.host.close()

    def _finish(self, lease: Lease) -> None:
        wrong = self._carry_out(lease.moves)
        assert not len(wrong), "only `open` restores from below"
        lease.ready()

    def _carry_out(self, moves: list[Move]) -> Pages:
        """In order, up to the first that finds wrong bytes: the host pages that hold them."""
        for move in moves:
            wrong = self._carry_out_one(move)
            if wrong:
                return np.array(wrong, dtype=np.int32)
        return np.empty(0, dtype=np.int32)

    def _carry_out_one(self, move: Move) -> list[int]:
        if move.source is None:
            self.pool.zero(move)
        elif move.source == move.target:
            self.pool.copy(move)
        else:
            assert self.host is not None, "moves to and from the host need its pages"
            if move.target == "host":
                self.host.save(self.pool, move)
            else:
                return self.host.restore(self.pool, move)
        return []


def make_memory(layout: Layout, config: StoreConfig, fingerprint: str, device: torch.device | str = "cpu") -> Memory:
    """A store with its pools. The host tier's pages lie in a new arena in the run folder. Raises ArenaError."""
    pool = DevicePool(layout, config.device_bytes // layout.page_bytes, device)
    host_bytes = config.host_bytes // layout.page_bytes * layout.page_bytes
    host = HostPool(Arena(config.run_dir, "host", host_bytes), layout.page_bytes) if host_bytes else None
    return Memory(Store(layout, config, fingerprint), pool, host)

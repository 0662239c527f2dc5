"""A store and the bytes it accounts for: every call carries out its moves before it returns.

memory.lookup -> Hit                what others stored meanwhile included
memory.open -> Lease | Refusal      the hit's rows and state are in the lease's pages, verified
memory.begin -> Opening             the same, without waiting for slow tiers
memory.ahead -> Ahead               before its turn: what lies in slow tiers comes into the host
memory.commit, checkpoint, grow     as the lease's own calls

A tier whose bytes this process does not own alone is a view: its pages in the store are numbers, and stand for what
lies there. Before a look-up the view adopts what others stored; what is gone is lost at `settle`, or is a restore that
finds wrong bytes. So a view that is behind costs a miss, never a wrong byte.
"""

import os
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from forebay.kvstore.ahead import Ahead
from forebay.kvstore.arena import start_time
from forebay.kvstore.chain import Chain
from forebay.kvstore.class_limits import quota_pages
from forebay.kvstore.config import StoreConfig
from forebay.kvstore.device import DevicePool, pin
from forebay.kvstore.directory import Directory
from forebay.kvstore.host import HostPool, Rows, Spill
from forebay.kvstore.layout import Layout
from forebay.kvstore.lease import Holder, Lease, Refusal
from forebay.kvstore.log_folder import LogError
from forebay.kvstore.moves import SLOW, Label, Move, Tier, mark_of
from forebay.kvstore.opening import Opening, Restoring, Target
from forebay.kvstore.pool_address import parse as parse_address
from forebay.kvstore.pool_client import MooncakeClient, load
from forebay.kvstore.pool_tier import PoolTier
from forebay.kvstore.shared_file import SharedFile
from forebay.kvstore.shared_table import geometry_of
from forebay.kvstore.ssd import AHEAD_BYTES as RESTORE_BYTES
from forebay.kvstore.ssd import Adopt, SsdPool, model_mark
from forebay.kvstore.ssd_slots import open_log
from forebay.kvstore.store import Hit, Store
from forebay.kvstore.turn import Turn

Bytes = npt.NDArray[np.uint8]
WAIT_S = 0.1
AHEAD_BYTES = 64 << 20
"""How much is read from the SSD for a prompt whose turn has not come, before the host has taken it."""


class View(Protocol):
    """The bytes of a tier that outlives this process or that others write too."""

    @property
    def tier(self) -> Tier: ...
    def discover(self, chain: Chain, adopt: Adopt) -> None:
        """Adopt what others stored, as far as it concerns the chain at least; note the pages it is given."""
        ...

    def take_lost(self) -> list[int]:
        """Pages whose bytes will not or no longer be there, since the last call."""
        ...


class Memory:
    def __init__(
        self,
        store: Store,
        pool: DevicePool,
        host: HostPool | None,
        ssd: SsdPool | None = None,
        pool_tier: PoolTier | None = None,
    ) -> None:
        """`pool`: device pages. `pool_tier`: the cluster-wide pool, as this worker sees it."""
        self.store = store
        self.pool = pool
        self.host = host
        self.ssd = ssd
        self.pool_tier = pool_tier
        self.ssd_failure: str | None = None
        self.views: list[View] = [view for view in (host, ssd, pool_tier) if view is not None]
        self._lost: dict[Tier, list[int]] = defaultdict(list)

    def lookup(self, chain: Chain, n_prompt: int) -> Hit:
        """The hit that `open` would restore now. Nothing is pinned or renewed."""
        self.discover(chain)
        return self.store.lookup(chain, n_prompt)

    def open(
        self,
        holder: Holder,
        chain: Chain | None,
        *,
        n_prompt: int,
        capacity_tokens: int,
        turn: Turn | None = None,
    ) -> Lease | Refusal:
        """As `Store.open`. Wrong bytes in a lower tier are dropped, and the rest of the hit is taken instead."""
        if turn is not None:
            self.advance(turn.now)
        if chain is not None:
            self.discover(chain)
            while self.waits(chain):
                self.wait(WAIT_S)
        opening = self.begin(holder, chain, n_prompt=n_prompt, capacity_tokens=capacity_tokens, turn=turn)
        while (answer := opening.poll()) is None:
            opening.wait(None)
        return answer

    def begin(
        self,
        holder: Holder,
        chain: Chain | None,
        *,
        n_prompt: int,
        capacity_tokens: int,
        turn: Turn | None = None,
    ) -> Opening:
        """As `open`; its answer may come later, and whoever drops it before must close it."""
        if turn is not None:
            self.advance(turn.now)
        if chain is not None:
            self.discover(chain)
        if self.host is not None:
            self.host.directory.count_request()
        return Opening(
            self,
            lambda reuse: self.store.open(
                holder, chain, n_prompt=n_prompt, capacity_tokens=capacity_tokens, reuse=reuse, turn=turn
            ),
        )

    def ahead(self, chain: Chain, n_prompt: int, most_bytes: int) -> Ahead | None:
        """Start to bring into the host what the prompt's hit has in slow tiers, up to so many bytes. Who drops it must
        close it. None where there is no host tier."""
        if self.host is None:
            return None
        below = self.store.below(chain, n_prompt, most_bytes)
        return Ahead(self.host, below, self._restore_into, self._spiller(), self.store.count_prefetch)

    def advance(self, now: float) -> None:
        """Time has come to `now`: what its class keeps no longer goes, in every tier here."""
        if self.store.advance(now) and self.host is not None:
            self.host.directory.expire(now)
            self.settle()

    def discover(self, chain: Chain) -> None:
        """Let the store know what others stored and what is gone: of this prompt at least."""
        self.settle()
        for view in self.views:
            view.discover(chain, self.store.adopt)

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
        """Remove the host tier's file; write what waits for the SSD; leave the pool."""
        if self.pool_tier is not None:
            self.pool_tier.close()
        if self.ssd is not None:
            self.ssd.close()
        if self.host is not None:
            self.host.close()

    def purge(self, *, session: str | None = None, salt: str | None = None) -> int:
        """As `Store.purge`: gone from this worker's device and SSD and from the node's host tier when this returns, or
        as soon as what reads it ends, and from the disk at the next sync. The cluster-wide pool is not asked."""
        self.settle()
        n_pages = self.store.purge(session=session, salt=salt)
        marks = None if session is None else mark_of(session), None if salt is None else mark_of(salt)
        if self.host is not None:
            self.host.directory.purge(*marks)
        if self.ssd is not None:
            self.ssd.log.purge(*marks)
        self.settle()
        return n_pages

    def carry_out(self, moves: list[Move]) -> tuple[Tier, list[int]] | None:
        """All but the slow reads, in order, up to the first that finds wrong bytes: which pages hold them."""
        self._change_below()
        with self.host.reading(moves) if self.host is not None else nullcontext():
            for move in moves:
                wrong = self._carry_out_one(move) if move.source not in SLOW else []
                if wrong:
                    return "host", wrong
        return None

    def restore(self, moves: list[Move]) -> Sequence[Restoring]:
        """Start the slow reads, one for each tier."""
        return self._restore_into(moves, self.pool, RESTORE_BYTES)

    def waits(self, chain: Chain) -> bool:
        """May a prompt that is queued gain by waiting a moment? The pool was asked what it has of it."""
        return self.pool_tier is not None and self.pool_tier.waits_for(chain)

    def wait(self, timeout_s: float) -> None:
        """Until an answer of the pool came."""
        if self.pool_tier is not None:
            self.pool_tier.wait(timeout_s)

    def drop_corrupt(self, tier: Tier, pages: list[int]) -> None:
        """What is gone is lost first: that is no damage."""
        self.settle()
        self.store.drop_corrupt(tier, pages)
        self._change_below()

    def lose(self, tier: Tier, pages: list[int]) -> None:
        self._lost[tier] += pages

    def count_restore(self, tier: Tier, seconds: float) -> None:
        self.store.count_restore(tier, seconds)

    def settle(self) -> None:
        """Let the store know what lower tiers gave up since the last call, or that one failed."""
        self._change_below()
        for view in self.views:
            if lost := self._lost.pop(view.tier, []) + view.take_lost():
                self.store.lose(view.tier, lost)
        if self.host is not None:
            free, used, cached = self.host.directory.counts()
            self.store.note_host(free=free, used=used, cached=cached)
        if self.pool_tier is not None:
            traffic = self.pool_tier.traffic
            self.store.note_pool(traffic.events, queued_bytes=traffic.queued_bytes)
        if self.ssd is None:
            return
        log = self.ssd.log
        if log.failure is not None and self.ssd_failure is None:
            self.fail_ssd(log.failure)
        self.store.note_ssd(log.events, held_bytes=log.segments.n_bytes, queued_bytes=log.queued_bytes)

    def _change_below(self) -> None:
        """Let lower tiers know what is to go from them for good, and what several sessions use."""
        for view in (self.host, self.ssd):
            if view is None:
                continue
            if shared := self.store.take_shared(view.tier):
                view.share(shared)
            if gone := self.store.take_gone_for_good(view.tier):
                view.erase(gone)

    def fail_ssd(self, why: str) -> None:
        """Serve on without it."""
        self.ssd_failure = why
        self.store.turn_off_ssd()

    def _finish(self, lease: Lease) -> None:
        wrong = self.carry_out(lease.moves)
        assert wrong is None, "only `open` restores from below"
        self.settle()  # what could not be saved is not to match, not even for a moment
        lease.ready()

    def _carry_out_one(self, move: Move) -> list[int]:
        if move.target in SLOW:
            self._save_below(move)
        elif move.source is None:
            self.pool.zero(move)
        elif move.source == move.target:
            self.pool.copy(move)
        else:
            assert self.host is not None, "moves to and from the host need its pages"
            if move.target == "host":
                self.host.save(self.pool, move, self._spiller())
            else:
                return self.host.restore(self.pool, move)
        return []

    def _restore_into(self, moves: list[Move], target: Target, ssd_bytes: int = AHEAD_BYTES) -> Sequence[Restoring]:
        started: list[Restoring] = []
        if up := [move for move in moves if move.source == "ssd"]:
            assert self.ssd is not None, "only what was saved is restored"
            started.append(self.ssd.restore(target, up, ssd_bytes))
        if up := [move for move in moves if move.source == "pool"]:
            assert self.pool_tier is not None, "only what was saved is restored"
            started.append(self.pool_tier.restore(target, up))
        return started

    def _spiller(self) -> Spill | None:
        return None if self.ssd is None or self.ssd_failure is not None else self._spill

    def _spill(self, label: Label, uses: int, expires_at: float, rows: Rows) -> None:
        """What leaves the host goes to the SSD, where the policy is to and it is not there yet."""
        pages = self.store.spill(label, uses, expires_at)
        if pages is not None:
            data = rows()
            down = Move(
                source="host",
                source_pages=pages[:0],
                target="ssd",
                target_pages=pages,
                n_bytes=0 if data is None else data.shape[1],
                label=label,
            )
            self._save_on_ssd(down, data)

    def _save_below(self, move: Move) -> None:
        if move.target == "pool":
            assert self.pool_tier is not None, "moves to the pool need it"
            self.pool_tier.save(move, partial(self._read, move))
            return
        self._save_on_ssd(move, self._read(move))

    def _save_on_ssd(self, move: Move, data: Bytes | None) -> None:
        assert self.ssd is not None, "moves to the SSD need it"
        if data is None:  # wrong bytes would get a right checksum
            self.ssd.lose(move)
        else:
            self.ssd.save(move, data, self._pinned_on_ssd)

    def _read(self, move: Move) -> Bytes | None:
        """What a move down is to save; None where the host finds it wrong."""
        if move.source == "device":
            return self.pool.gather(move.source_pages, move.n_bytes)
        assert self.host is not None, "moves from the host need its pages"
        return self.host.read(move)

    def _pinned_on_ssd(self) -> list[int]:
        return self.store.pinned("ssd")


def make_memory(layout: Layout, config: StoreConfig, fingerprint: str, device: torch.device | str = "cpu") -> Memory:
    """A store with its pools. The host tier lies in the run folder, shared with whoever names the same cluster. Raises
    ArenaError.

    An SSD tier that cannot be opened is off, and `ssd_failure` says why.
    """
    pool = DevicePool(layout, config.device_bytes // layout.page_bytes, device)
    store = Store(layout, config, fingerprint)
    ssd, failure = _open_ssd(layout, config, store)
    host = _join_host(layout, config, store, device)
    memory = Memory(store, pool, host, ssd, _join_pool(layout, config, fingerprint))
    if failure is not None:
        memory.fail_ssd(failure)
    memory.settle()
    return memory


def _join_host(layout: Layout, config: StoreConfig, store: Store, device: torch.device | str) -> HostPool | None:
    """The view of the arena of this node and cluster, which the first worker makes."""
    if config.host_bytes < layout.page_bytes:
        return None
    file = SharedFile(config.run_dir, f"host-{config.cluster}", geometry_of(layout, config.host_bytes))
    quotas = quota_pages({each.name: each.host_bytes for each in config.classes}, layout.page_bytes)
    return HostPool(
        Directory(file, os.getpid(), start_time(os.getpid()), quotas=quotas),
        layout,
        model_mark(store.fingerprint),
        n_pages=store.tier_pages("host"),
        rank=config.rank,
        ranks=config.ranks,
        unpin=pin(file.bytes, device),
    )


def _open_ssd(layout: Layout, config: StoreConfig, store: Store) -> tuple[SsdPool | None, str | None]:
    """The tier, with what an earlier process left there; or why there is none."""
    if config.ssd_path is None:
        return None, None
    of_rank = f" rank {config.rank} of {config.ranks}" if config.ranks > 1 else ""
    mark = model_mark(store.fingerprint + of_rank)
    try:
        ssd = SsdPool(open_log(layout, config, mark), layout)
    except LogError as error:
        return None, str(error)
    ssd.recover(mark, store.adopt)
    return ssd, None


def _join_pool(layout: Layout, config: StoreConfig, fingerprint: str) -> PoolTier | None:
    """Joined in the background: until then, and while its master is away, all there is a miss. Raises PoolError where
    Mooncake is not installed."""
    if config.pool is None:
        return None
    address = parse_address(config.pool)
    assert address is not None, "a master of one's own has an address once it is started"
    load("mooncake.store")
    return PoolTier(partial(MooncakeClient, address, config), layout, model_mark(fingerprint), config)

"""A store and the bytes it accounts for: every call carries out its moves before it returns.

memory.open -> Lease | Refusal      the hit's rows and state are in the lease's pages, verified
memory.begin -> Opening             the same, without waiting for the SSD
memory.commit, checkpoint, grow     as the lease's own calls
"""

import torch

from forebay.kvstore.arena import Arena
from forebay.kvstore.chain import Chain
from forebay.kvstore.config import StoreConfig
from forebay.kvstore.device import DevicePool
from forebay.kvstore.host import HostPool
from forebay.kvstore.layout import Layout
from forebay.kvstore.lease import Holder, Lease, Refusal
from forebay.kvstore.log_folder import LogError
from forebay.kvstore.moves import Move, Tier
from forebay.kvstore.opening import Opening, Restoring
from forebay.kvstore.ssd import SsdPool, model_mark
from forebay.kvstore.ssd_slots import open_log
from forebay.kvstore.store import Store


class Nothing:
    """A restore without anything to read."""

    def __init__(self) -> None:
        self.wrong: list[int] = []

    def advance(self) -> bool:
        return True

    def wait(self, timeout_s: float | None) -> None:
        return


class Memory:
    def __init__(self, store: Store, pool: DevicePool, host: HostPool | None, ssd: SsdPool | None = None) -> None:
        self.store = store
        self.pool = pool
        self.host = host
        self.ssd = ssd
        self.ssd_failure: str | None = None
        self._lost: list[int] = []

    def open(self, holder: Holder, chain: Chain | None, *, n_prompt: int, capacity_tokens: int) -> Lease | Refusal:
        """As `Store.open`. Wrong bytes in a lower tier are dropped, and the rest of the hit is taken instead."""
        opening = self.begin(holder, chain, n_prompt=n_prompt, capacity_tokens=capacity_tokens)
        while (answer := opening.poll()) is None:
            opening.wait(None)
        return answer

    def begin(self, holder: Holder, chain: Chain | None, *, n_prompt: int, capacity_tokens: int) -> Opening:
        """As `open`; its answer may come later, and whoever drops it before must close it."""
        return Opening(
            self,
            lambda reuse: self.store.open(
                holder, chain, n_prompt=n_prompt, capacity_tokens=capacity_tokens, reuse=reuse
            ),
        )

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
        """Remove the host tier's file; write what waits for the SSD."""
        if self.ssd is not None:
            self.ssd.close()
        if self.host is not None:
            self.host.close()

    def carry_out(self, moves: list[Move]) -> tuple[Tier, list[int]] | None:
        """All but the reads from the SSD, in order, up to the first that finds wrong bytes: which pages hold them."""
        for move in moves:
            wrong = self._carry_out_one(move) if move.source != "ssd" else []
            if wrong:
                return "host", wrong
        return None

    def restore(self, moves: list[Move]) -> Restoring:
        """Start the reads from the SSD."""
        up = [move for move in moves if move.source == "ssd"]
        if not up:
            return Nothing()
        assert self.ssd is not None, "only what was saved is restored"
        return self.ssd.restore(self.pool, up)

    def drop_corrupt(self, tier: Tier, pages: list[int]) -> None:
        self.store.drop_corrupt(tier, pages)

    def settle(self) -> None:
        """Let the store know what the SSD gave up since the last call, or that it failed."""
        if self.ssd is None:
            return
        self._lost += self.ssd.take_lost()
        if self._lost:
            self._lost = self.store.lose("ssd", self._lost)
        log = self.ssd.log
        if log.failure is not None and self.ssd_failure is None:
            self.fail_ssd(log.failure)
        self.store.note_ssd(log.events, held_bytes=log.segments.n_bytes, queued_bytes=log.queued_bytes)

    def fail_ssd(self, why: str) -> None:
        """Serve on without it."""
        self.ssd_failure = why
        self.store.turn_off_ssd()

    def _finish(self, lease: Lease) -> None:
        wrong = self.carry_out(lease.moves)
        assert wrong is None, "only `open` restores from below"
        lease.ready()
        self.settle()

    def _carry_out_one(self, move: Move) -> list[int]:
        if move.target == "ssd":
            self._save_to_ssd(move)
        elif move.source is None:
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

    def _save_to_ssd(self, move: Move) -> None:
        assert self.ssd is not None, "moves to the SSD need it"
        if move.source == "device":
            self.ssd.save(move, self.pool.gather(move.source_pages, move.n_bytes), self.store.pinned_on_ssd)
            return
        assert self.host is not None
        data = self.host.read(move)
        if data is None:  # wrong bytes would get a right checksum
            self.ssd.lose(move)
        else:
            self.ssd.save(move, data, self.store.pinned_on_ssd)


def make_memory(layout: Layout, config: StoreConfig, fingerprint: str, device: torch.device | str = "cpu") -> Memory:
    """A store with its pools. The host tier's pages lie in a new arena in the run folder. Raises ArenaError.

    An SSD tier that cannot be opened is off, and `ssd_failure` says why.
    """
    pool = DevicePool(layout, config.device_bytes // layout.page_bytes, device)
    host_bytes = config.host_bytes // layout.page_bytes * layout.page_bytes
    host = HostPool(Arena(config.run_dir, "host", host_bytes), layout.page_bytes) if host_bytes else None
    store = Store(layout, config, fingerprint)
    if config.ssd_path is None:
        return Memory(store, pool, host)
    try:
        ssd = SsdPool(open_log(layout, config, model_mark(fingerprint)), layout)
    except LogError as error:
        memory = Memory(store, pool, host)
        memory.fail_ssd(str(error))
        return memory
    ssd.recover(model_mark(fingerprint), store.adopt)
    memory = Memory(store, pool, host, ssd)
    memory.settle()
    return memory

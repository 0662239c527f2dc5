"""The store's contract (bodies follow in the next commits).

    chain = store.chain(ids, salt)                              # kvstore/chain.py: Chain(fingerprint, keys)
    hit = store.lookup(chain, n_prompt)                         # pure; renews nothing
    lease = store.open(holder, chain, n_prompt=.., capacity_tokens=..)   # Lease | Refusal
    with lease: pool executes lease.moves; lease.ready(); ...; lease.commit(upto); lease.checkpoint(at)

Workers mostly use `kvstore.memory.Memory`, which carries out the moves:

    memory = Memory(store, device_pool, host_pool)   # or make_memory(layout, config, fingerprint, device)
    memory.open(holder, chain, n_prompt=.., capacity_tokens=..) -> Lease | Refusal    # bytes in place, ready
    memory.commit(lease, upto_tokens) -> None        # blocks below upto_tokens have their bytes: matchable
    memory.checkpoint(lease, at_tokens) -> Refusal | None    # copies the running state, which stands at at_tokens
    memory.grow(lease, capacity_tokens) -> Refusal | None    # lease.pages is replaced: read it again
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from forebay.kvstore.chain import Chain
from forebay.kvstore.moves import Move, Pages, Tier

MissReason = Literal["never_stored", "evicted", "no_checkpoint", "sibling_missing", "corrupt", "other_model"]


class Holder(Protocol):
    """`workers.job.Holder` is one."""

    @property
    def name(self) -> str: ...
    @property
    def epoch(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """`tokens` can be restored (a multiple of the block, at most n_prompt - 1); `run_tokens` >= tokens have their rows.

    `tier_tokens` splits `tokens` by the lowest tier that a token's rows come from. `miss`: why not longer, None if it
    could not be.
    """

    tokens: int
    run_tokens: int
    miss: MissReason | None
    tier_tokens: dict[Tier, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """`full`: try again when leases close. `too_large`: never. Nothing was changed."""

    kind: Literal["full", "too_large"]
    needed_pages: int
    available_pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Final fields follow: per tier free/leased/cached/total pages; looked-up and hit tokens; evictions; misses."""


class Lease:
    """Pages of one request. A context manager; `close()` is idempotent.

    pages: dict group name -> int32 [layers in group, spans]; a state group has one span: the running state,
           zeroed or restored to position hit_tokens by `moves`.
    checkpoints: positions in (hit_tokens, n_prompt] at which the policy wants `checkpoint(at)` called.
    """

    hit: Hit
    hit_tokens: int
    pages: dict[str, Pages]
    moves: list[Move]
    checkpoints: tuple[int, ...]
    capacity_tokens: int
    closed: bool

    def ready(self) -> None:
        """`moves` were carried out, all of them, in order. They are forgotten, and what they wrote may match."""
        raise NotImplementedError

    def commit(self, upto_tokens: int) -> None:
        """The rows of every token below are in the pages: whole blocks of the prompt become matchable. May add moves."""
        raise NotImplementedError

    def checkpoint(self, at_tokens: int) -> Refusal | None:
        """Keep the running state, which stands at `at_tokens` (a block end): adds moves, matchable after `ready`."""
        raise NotImplementedError

    def grow(self, capacity_tokens: int) -> Refusal | None:
        """Pages for more tokens. `pages` is replaced. May add moves."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class Store:
    def chain(self, ids: Sequence[int], salt: str = "") -> Chain:
        raise NotImplementedError

    def lookup(self, chain: Chain, n_prompt: int) -> Hit:
        raise NotImplementedError

    def open(self, holder: Holder, chain: Chain | None, *, n_prompt: int, capacity_tokens: int) -> Lease | Refusal:
        """`chain` None: nothing is looked up, nothing can be committed (a decode worker)."""
        raise NotImplementedError

    def release_holder(self, holder: Holder) -> int:
        """Close every lease of that name whose epoch is not newer. Returns how many."""
        raise NotImplementedError

    def check(self) -> None:
        raise NotImplementedError

    def stats(self) -> StoreStats:
        raise NotImplementedError

"""A model whose bytes are hashes of tokens: what any page must hold is recomputed from the tokens alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import numpy as np

from forebay.kvstore.layout import Layout, make_layout
from forebay.kvstore.memory import Memory
from forebay.kvstore.moves import Tier
from forebay.kvstore.store import Lease

BLOCK = 4


@dataclass(frozen=True)
class Owner:
    name: str = "ingress"
    epoch: int = 1


def tiny_layout(state_bytes: int = 90) -> Layout:
    """Pages of 96 bytes: 12 latent rows (3 blocks) or 24 index keys (6 blocks); two KDA groups of two layers."""
    return make_layout(
        block_tokens=BLOCK,
        global_layers=(2, 5),
        kda_layers=(0, 1, 3, 4),
        latent_row_bytes=8,
        index_row_bytes=4,
        state_bytes=state_bytes,
    )


def one_block_layout() -> Layout:
    """Pages of 32 bytes, one block each: what is used is known to the token."""
    return make_layout(
        block_tokens=BLOCK,
        global_layers=(2, 5),
        kda_layers=(0, 1, 3, 4),
        latent_row_bytes=8,
        index_row_bytes=8,
        state_bytes=30,
    )


@lru_cache(maxsize=1 << 17)
def digest(name: str, layer: int, prefix: tuple[int, ...], n_bytes: int) -> bytes:
    """What a layer's row of the prefix's last token is, or its state after the prefix."""
    seed = blake2b(f"{name} {layer} {prefix}".encode()).digest()
    return (seed * (n_bytes // len(seed) + 1))[:n_bytes]


def state(name: str, layer: int, prefix: tuple[int, ...], n_bytes: int) -> bytes:
    return digest(name, layer, prefix, n_bytes) if prefix else bytes(n_bytes)


def compute(memory: Memory, lease: Lease, ids: Sequence[int], start: int, end: int) -> None:
    """Write rows of tokens [start, end) and the state after them, as a model would."""
    pool = memory.pool.bytes.numpy()
    for group in memory.store.layout.paged:
        for layer, pages in zip(group.layers, lease.pages[group.name], strict=True):
            for at in range(start, end):
                row = digest(group.name, layer, tuple(ids[: at + 1]), group.row_bytes)
                offset = at % group.page_tokens * group.row_bytes
                pool[pages[at // group.page_tokens], offset : offset + group.row_bytes] = np.frombuffer(row, np.uint8)
    for kda in memory.store.layout.states:
        for layer, pages in zip(kda.layers, lease.pages[kda.name], strict=True):
            content = state(kda.name, layer, tuple(ids[:end]), kda.state_bytes)
            pool[pages[0], : kda.state_bytes] = np.frombuffer(content, np.uint8)


def verify(memory: Memory, lease: Lease, ids: Sequence[int], upto: int) -> None:
    """Assert that the lease's pages hold the rows of tokens [0, upto) and the state after them."""
    pool = memory.pool.bytes.numpy()
    for group in memory.store.layout.paged:
        for layer, pages in zip(group.layers, lease.pages[group.name], strict=True):
            flat = pool[pages, : group.page_tokens * group.row_bytes].reshape(-1, group.row_bytes)
            for at in range(upto):
                assert flat[at].tobytes() == digest(group.name, layer, tuple(ids[: at + 1]), group.row_bytes), (
                    f"{group.name} layer {layer} token {at}"
                )
    for kda in memory.store.layout.states:
        for layer, pages in zip(kda.layers, lease.pages[kda.name], strict=True):
            found = pool[pages[0], : kda.state_bytes].tobytes()
            assert found == state(kda.name, layer, tuple(ids[:upto]), kda.state_bytes), f"{kda.name} layer {layer}"


OWNER = Owner()


def open_lease(memory: Memory, ids: list[int]) -> Lease:
    lease = memory.open(OWNER, memory.store.chain(ids), n_prompt=len(ids), capacity_tokens=len(ids))
    assert isinstance(lease, Lease)
    return lease


def serve(memory: Memory, ids: list[int]) -> tuple[int, str | None]:
    """One whole request, checked at its start: its hit, and why it was not longer."""
    with open_lease(memory, ids) as lease:
        verify(memory, lease, ids, lease.hit_tokens)
        at = lease.hit_tokens
        for end in (*lease.checkpoints, len(ids)):
            compute(memory, lease, ids, at, end)
            memory.commit(lease, end)
            if end in lease.checkpoints:
                memory.checkpoint(lease, end)
            at = end
        return lease.hit_tokens, lease.hit.miss


def pushed_out(memory: Memory, tier: Tier) -> list[int]:
    """A prompt that lies in that tier only, in a device that holds one."""
    ids = list(range(30))
    serve(memory, ids)
    serve(memory, [9] * 40)
    found = memory.store.lookup(memory.store.chain(ids), 30)
    assert (found.tier_tokens, found.state_tier) == ({tier: 28}, tier)
    return ids

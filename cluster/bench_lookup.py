"""Figures of the way into the store: hashing a long prompt, looking it up, and copying with a checksum."""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import numpy.typing as npt

from forebay.kernels.costs import latent_row_bytes, state_bytes
from forebay.kernels.models import SHAPES
from forebay.kvstore.chain import block_chain
from forebay.kvstore.chains import Chains
from forebay.kvstore.checksum import copy_checked
from forebay.kvstore.config import StoreConfig
from forebay.kvstore.layout import Layout, make_layout
from forebay.kvstore.lease import Lease
from forebay.kvstore.store import Store
from forebay.ops.bench_report import Reference, Row
from forebay.workers.job import Holder

SHAPE = SHAPES["k3"]
BLOCK_TOKENS = 512
PROMPT_TOKENS = 1 << 20
TAIL_TOKENS = 4096
ROUNDS = 9
COPY_BYTES, COPIED_BYTES = 16 << 20, 512 << 20
MS, GB = 1e3, 1e9


def bench_lookup() -> Iterator[Row]:
    """Rows for the report, medians over ROUNDS."""
    yield from _hash_rows()
    yield _lookup_row()
    yield _checksum_row()


def _hash_rows() -> Iterator[Row]:
    ids = np.random.default_rng(0).integers(0, SHAPE.vocab, PROMPT_TOKENS, dtype=np.int32)
    whole_s = _median(lambda: _timed(lambda: block_chain(ids, BLOCK_TOKENS, "model", "")))
    tail_s = _median(lambda: _next_turn(ids))
    yield Row(name=f"hashing {PROMPT_TOKENS} tokens, blocks of {BLOCK_TOKENS}", value=whole_s * MS, unit="ms")
    yield Row(
        name=f"the same of a known session, {TAIL_TOKENS} of them new",
        value=tail_s * MS,
        unit="ms",
        reference=Reference(name="hashing all", value=whole_s * MS),
    )


def _next_turn(ids: npt.NDArray[np.int32]) -> float:
    chains = Chains(BLOCK_TOKENS, "model")
    chains.chain(ids[:-TAIL_TOKENS], "", "session")
    return _timed(lambda: chains.chain(ids, "", "session"))


def _lookup_row() -> Row:
    """Of a prompt that is there whole: every group's blocks, then the checkpoint at its end."""
    layout = _layout()
    store = Store(layout, StoreConfig(device_bytes=_pages(layout) * layout.page_bytes, run_dir=""), "model")
    chain = store.chain(np.arange(PROMPT_TOKENS, dtype=np.int32))
    lease = store.open(Holder(name="bench", epoch=1), chain, n_prompt=PROMPT_TOKENS, capacity_tokens=PROMPT_TOKENS)
    assert isinstance(lease, Lease)
    with lease:
        lease.ready()
        lease.commit(PROMPT_TOKENS)
        assert lease.checkpoint(PROMPT_TOKENS) is None
        lease.ready()
    assert store.lookup(chain, PROMPT_TOKENS + 1).tokens == PROMPT_TOKENS
    groups = len(layout.paged) + len(layout.states)
    taken_s = _median(lambda: _timed(lambda: store.lookup(chain, PROMPT_TOKENS + 1)))
    return Row(name=f"look-up of {len(chain.keys)} blocks in {groups} groups", value=taken_s * MS, unit="ms")


def _layout() -> Layout:
    return make_layout(
        block_tokens=BLOCK_TOKENS,
        global_layers=SHAPE.global_layers,
        kda_layers=SHAPE.kda_layers,
        latent_row_bytes=latent_row_bytes(SHAPE),
        index_row_bytes=None,
        state_bytes=state_bytes(SHAPE),
    )


def _pages(layout: Layout) -> int:
    """For one prompt, its running state, and one checkpoint; and as much again."""
    rows = sum(len(group.layers) * (PROMPT_TOKENS // group.page_tokens + 1) for group in layout.paged)
    return 2 * (rows + 2 * layout.state_pages)


def _checksum_row() -> Row:
    """Pages copied one after another, more of them than any cache holds; every other one with its checksum, so that
    both meet the same noise."""
    source = np.random.default_rng(0).integers(0, 256, (COPIED_BYTES // COPY_BYTES, 1, COPY_BYTES), dtype=np.uint8)
    target = np.zeros_like(source)
    alone, checked = [], []
    for _ in range(ROUNDS):
        for page in range(0, len(source) - 1, 2):
            alone.append(_timed(partial(np.copyto, target[page], source[page])))
            checked.append(_timed(partial(copy_checked, target[page + 1], source[page + 1])))
    return Row(
        name=f"copy with its checksum, {COPY_BYTES >> 20} MiB each",
        value=COPY_BYTES / statistics.median(checked) / GB,
        unit="GB/s",
        reference=Reference(name="copy alone", value=COPY_BYTES / statistics.median(alone) / GB),
    )


def _median(of: Callable[[], float]) -> float:
    return float(statistics.median(of() for _ in range(ROUNDS)))


def _timed(do: Callable[[], object]) -> float:
    start = time.perf_counter()
    do()
    return time.perf_counter() - start

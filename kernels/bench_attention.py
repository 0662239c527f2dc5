"""Measurements of latent attention, the indexer and top-k beside the floor and the figures published, every operator
checked first: against float64 on the same inputs, for the same bits at a second run, top-k for the very set.

The floor is every input read once and every output written once at the copy rate of an H200, or the products at its
bf16 rate (twice that in fp8), the larger.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.kernels import bench_attention_inputs as inputs
from forebay.kernels import by_device, costs, dsa_batch, mla_batch, reference
from forebay.kernels.bench_attention_inputs import Sizes
from forebay.kernels.bench_inputs import relative
from forebay.kernels.bench_timing import median_ms
from forebay.kernels.models import K3_1_PRO
from forebay.ops.bench_report import Reference, Row

COPY_BYTES_PER_MS, FLOP_PER_MS = 4.26e9, 7.9e11
ATTENTION_ERROR_MAX = 1.8e-3  # FlashAttention 3's sparse form, published, against float64
SCORES_ERROR_MAX = 6e-5  # DeepGEMM's, published, on the quantized inputs
PREFILL_ERROR_MAX = 5e-3  # products of products in bf16: keys and values are rounded once more
CONTEXT = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measurement: `run` with its inputs in it, the floor in ms, and the best public figure on an H200."""

    name: str
    run: Callable[[], object]
    floor_ms: float
    published: Reference | None = None


def rows(device: torch.device, repeats: int) -> Iterator[Row]:
    """Every measurement that this device can make. On a CPU of a small layer, which shows that it works."""
    on_gpu = device.type == "cuda"
    sizes = inputs.released(device) if on_gpu else inputs.small(device)
    yield from check(sizes, 4096 if on_gpu else 300)
    if on_gpu:
        yield from check(inputs.released(device, 8), 4096)
    for make in _all(device):
        yield from measure(make(), device, repeats)  # made one by one: their inputs would not fit together


def measure(case: Case, device: torch.device, repeats: int) -> Iterator[Row]:
    ms = median_ms(case.run, device, repeats)
    yield Row(name=case.name, value=ms, unit="ms", reference=Reference(name="floor", value=case.floor_ms))
    if case.published is not None:
        yield Row(name=case.name, value=ms, unit="ms", reference=case.published)


def _all(device: torch.device) -> Iterator[Callable[[], Case]]:
    if device.type != "cuda":
        of = inputs.small(device)
        yield lambda: sparse(of, 2, 300)
        yield lambda: dense(of, 2, 300)
        yield lambda: score(of, 2, 300)
        yield lambda: top_k(of, 2, 300)
        yield lambda: prefill(of, 64, 64)
        return
    whole, eighth = inputs.released(device), inputs.released(device, 8)
    for batch, ms in ((1, 0.0212), (16, 0.0378), (64, 0.0812)):
        yield _later(sparse, whole, batch, CONTEXT, _reference("FlashAttention 3 sparse", ms))
    for batch, ms in ((1, 0.0104), (16, 0.0508), (64, 0.1488)):
        yield _later(score, whole, batch, CONTEXT, _reference("DeepGEMM", ms))
    for batch, ms in ((1, 0.0156), (16, 0.0190), (64, 0.0434)):
        yield _later(top_k, whole, batch, CONTEXT, _reference("vLLM", ms))
    yield _later(top_k, whole, 1, 1 << 20, None)
    for batch in (1, 16, 64, 128):
        yield _later(dense, whole, batch, 8192, None)
    for batch in (1, 32):
        yield _later(sparse, eighth, batch, CONTEXT, None)
        yield _later(dense, eighth, batch, 8192, None)
    yield _later(sparse_prefill, whole, 512, CONTEXT, None)
    yield _later(score_prefill, whole, 256, CONTEXT, None)
    for tokens, start in ((4096, 0), (2048, 30720)):
        yield _later(prefill, whole, tokens, start, None)
    yield _later(write, whole, 64, CONTEXT, None)


def _later(
    make: Callable[[Sizes, int, int, Reference | None], Case], sizes: Sizes, n: int, length: int, r: Reference | None
) -> Callable[[], Case]:
    return lambda: make(sizes, n, length, r)


def _reference(name: str, ms: float) -> Reference:
    return Reference(name=f"{name}, published", value=ms)


def _floor(moved_bytes: float, flops: float) -> float:
    return max(moved_bytes / COPY_BYTES_PER_MS, flops / FLOP_PER_MS)


def _attention_flops(sizes: Sizes, rows: int) -> float:
    """Absorbed, of one query over `rows` rows."""
    layers, heads = len(K3_1_PRO.global_layers), K3_1_PRO.mla.heads
    return costs.absorbed_attention_flops(K3_1_PRO, rows) / layers * sizes.mla.heads / heads


def _attention_floor(sizes: Sizes, queries: int, rows: int, rows_read: int) -> float:
    own = queries * sizes.mla.heads * (sizes.width + sizes.mla.kv_rank) * costs.BF16
    return _floor(rows_read * sizes.width * costs.BF16 + own, queries * _attention_flops(sizes, rows))


def sparse(sizes: Sizes, batch: int, length: int, published: Reference | None = None) -> Case:
    """One token of each of `batch` sequences over its top-k rows."""
    return _over_chosen(f"sparse attention B {batch}", sizes, batch, batch, length, published)


def sparse_prefill(sizes: Sizes, tokens: int, length: int, published: Reference | None = None) -> Case:
    """`tokens` tokens of one sequence, each over rows of its own."""
    return _over_chosen(f"sparse attention of a prefill T {tokens}", sizes, tokens, 1, length, published)


def _over_chosen(
    what: str, sizes: Sizes, queries: int, sequences: int, length: int, published: Reference | None
) -> Case:
    pages, q = inputs.rows(sizes, sequences, length), inputs.absorbed(sizes, queries)
    of, k = inputs.chosen(sizes, pages, queries, length), min(length, sizes.index.top_k)
    attend, rank = by_device.mla(sizes.device).attend_slots, sizes.mla.kv_rank
    return Case(
        name=f"{what} H {sizes.mla.heads} k {k}",
        run=lambda: attend(q, pages, of.slots, of.counts, sizes.scale, rank),
        floor_ms=_attention_floor(sizes, queries, k, min(queries * k, sequences * length)),
        published=published,
    )


def dense(sizes: Sizes, batch: int, length: int, published: Reference | None = None) -> Case:
    pages, q, seen = (
        inputs.rows(sizes, batch, length),
        inputs.absorbed(sizes, batch),
        inputs.lengths(sizes, batch, length),
    )
    attend, rank = by_device.mla(sizes.device).attend, sizes.mla.kv_rank
    return Case(
        name=f"latent attention B {batch} H {sizes.mla.heads} S {length}",
        run=lambda: attend(q, pages, seen, sizes.scale, rank),
        floor_ms=_attention_floor(sizes, batch, length, batch * length),
        published=published,
    )


def score(sizes: Sizes, batch: int, length: int, published: Reference | None = None) -> Case:
    return _scores(f"index scores B {batch} S {length}", sizes, batch, batch, length, published)


def score_prefill(sizes: Sizes, tokens: int, length: int, published: Reference | None = None) -> Case:
    return _scores(f"index scores of a prefill T {tokens} S {length}", sizes, tokens, 1, length, published)


def _scores(what: str, sizes: Sizes, queries: int, sequences: int, length: int, published: Reference | None) -> Case:
    pages, (codes, weights) = inputs.keys(sizes, sequences, length), inputs.index_queries(sizes, queries)
    seen = inputs.lengths(sizes, queries, length)
    run = by_device.dsa(sizes.device).scores
    flops = queries * costs.index_flops(K3_1_PRO, length) / len(K3_1_PRO.global_layers)
    key_bytes = sizes.index.head_dim + costs.FP8_SCALE_BYTES
    moved = sequences * length * key_bytes + codes.nbytes + queries * length * costs.FP32
    return Case(
        name=what,
        run=lambda: run(codes, weights, pages, seen, length),
        floor_ms=_floor(moved, flops / 2),
        published=published,
    )


def top_k(sizes: Sizes, queries: int, length: int, published: Reference | None = None) -> Case:
    pages, values = inputs.rows(sizes, 1, length), inputs.row_values(sizes, queries, length)
    seen, k = inputs.lengths(sizes, queries, length), sizes.index.top_k
    run = by_device.dsa(sizes.device).top_k
    return Case(
        name=f"top-k {k} of {length}, rows {queries}",
        run=lambda: run(values, seen, k, pages),
        floor_ms=_floor(values.nbytes + 2 * queries * k * 4, 0),
        published=published,
    )


def prefill(sizes: Sizes, tokens: int, start: int, published: Reference | None = None) -> Case:
    m, device, dtype = sizes.mla, sizes.device, sizes.dtype
    pages, q, w_uk, w_uv = _prefill_inputs(sizes, tokens, start)
    run = by_device.mla(device).prefill
    seen = tokens * start + tokens * (tokens + 1) / 2
    expand = 2 * (start + tokens) * m.heads * m.kv_rank * (m.nope_dim + m.value_dim)
    flops = 2 * m.heads * (m.query_dim + m.value_dim) * seen + expand
    moved = (start + tokens) * sizes.width * dtype.itemsize + q.nbytes + tokens * m.heads * m.value_dim * dtype.itemsize
    return Case(
        name=f"prefill attention T {tokens} behind {start} H {m.heads}",
        run=lambda: run(q, pages, w_uk, w_uv, start),
        floor_ms=_floor(moved, flops),
        published=published,
    )


def _prefill_inputs(sizes: Sizes, tokens: int, start: int) -> tuple[mla_batch.Pages, Tensor, Tensor, Tensor]:
    m = sizes.mla
    q = torch.randn(tokens, m.heads, m.query_dim, device=sizes.device).to(sizes.dtype)
    w_uk = torch.randn(m.heads, m.nope_dim, m.kv_rank, device=sizes.device) * m.kv_rank**-0.5
    w_uv = torch.randn(m.heads, m.kv_rank, m.value_dim, device=sizes.device) * m.kv_rank**-0.5
    return inputs.rows(sizes, 1, start + tokens), q, w_uk.to(sizes.dtype), w_uv.to(sizes.dtype)


def write(sizes: Sizes, batch: int, length: int, published: Reference | None = None) -> Case:
    """Keys of one token of each sequence."""
    pages = inputs.keys(sizes, batch, length)
    values = torch.randn(batch, sizes.index.head_dim, dtype=sizes.dtype, device=sizes.device)
    last = inputs.lengths(sizes, batch, length - 1)
    run = by_device.dsa(sizes.device).write_keys
    return Case(
        name=f"index keys written B {batch}",
        run=lambda: run(values, last, pages),
        floor_ms=_floor(values.nbytes + batch * (sizes.index.head_dim + costs.FP8_SCALE_BYTES), 0),
        published=published,
    )


# --- Checks


def check(sizes: Sizes, length: int) -> Iterator[Row]:
    """Errors of every operator; a run that is wrong or wavers ends here."""
    ranks = f"H {sizes.mla.heads}"
    yield from _check_attention(sizes, length, ranks)
    yield from _check_prefill(sizes, length, ranks)
    yield from _check_indexer(sizes, length)
    _check_top_k(sizes, 5 * length)


def _twice(run: Callable[[], Tensor]) -> Tensor:
    made, again = run(), run()
    assert torch.equal(made, again), "the same inputs give the same bits"
    return made


def _error(name: str, found: Tensor, right: Tensor, most: float, public: str | None) -> Row:
    error = relative(found, right)
    assert error <= most, f"{name} is wrong: {error}"
    beside = None if public is None else Reference(name=f"{public}, published", value=most)
    return Row(name=f"{name} error", value=error, unit="relative", reference=beside)


def _check_attention(sizes: Sizes, length: int, ranks: str) -> Iterator[Row]:
    """Ragged lengths, dense and over chosen rows, at a batch that is split and one that is not."""
    attention, rank = by_device.mla(sizes.device), sizes.mla.kv_rank
    for batch in (3, 136):
        pages, q = inputs.rows(sizes, batch, length), inputs.absorbed(sizes, batch)
        seen = torch.randint(1, length + 1, (batch,), dtype=torch.int32, device=sizes.device)
        of = by_device.dsa(sizes.device).top_k(inputs.row_values(sizes, batch, length), seen, sizes.index.top_k, pages)
        few = [n for n in range(batch) if n < 3]
        gold = torch.cat([_gold(sizes, q[n], pages, n, torch.arange(int(seen[n]), device=q.device)) for n in few])
        made = _twice(lambda: attention.attend(q, pages, seen, sizes.scale, rank))  # noqa: B023
        name = f"latent attention B {batch} {ranks}"
        yield _error(name, made[:3], gold, ATTENTION_ERROR_MAX, "FlashAttention 3 sparse")
        gold = torch.cat([_gold(sizes, q[n], pages, n, of.positions[n, : int(of.counts[n])]) for n in few])
        made = _twice(lambda: attention.attend_slots(q, pages, of.slots, of.counts, sizes.scale, rank))  # noqa: B023
        name = f"sparse attention B {batch} {ranks}"
        yield _error(name, made[:3], gold, ATTENTION_ERROR_MAX, "FlashAttention 3 sparse")


def _gold(sizes: Sizes, q: Tensor, pages: mla_batch.Pages, n: int, positions: Tensor) -> Tensor:
    """One query [H, r+pe] of sequence n over the rows at `positions`, in float64: [1, H, r]."""
    own = mla_batch.Pages(pool=pages.pool, table=pages.table[n : n + 1])
    read = pages.take(own.slots(positions[None])[0]).double()
    p = torch.softmax(q.double() @ read.T * sizes.scale, dim=-1)
    return (p @ read[:, : sizes.mla.kv_rank])[None]


def _check_prefill(sizes: Sizes, length: int, ranks: str) -> Iterator[Row]:
    """The last tokens of a chunk behind a start that is no multiple of anything, against the slow twin in float64."""
    tokens, last = length // 4, 4
    start = length - tokens - 3
    pages, q, w_uk, w_uv = _prefill_inputs(sizes, tokens, start)
    made = _twice(lambda: by_device.mla(sizes.device).prefill(q, pages, w_uk, w_uv, start))
    read = pages.take(pages.slots(torch.arange(start + tokens, device=q.device)[None])[0]).double()
    given = q[-last:].double(), read, w_uk.double(), w_uv.double()
    gold = reference.attend_prefill(*given, start + tokens - last)
    yield _error(f"prefill attention {ranks}", made[-last:], gold, PREFILL_ERROR_MAX, None)


def _check_indexer(sizes: Sizes, length: int) -> Iterator[Row]:
    """Written bytes as the twin's; scores of a decode and of a prefill against float64 on the quantized inputs."""
    device = sizes.device
    pages = inputs.keys(sizes, 2, length)
    values = torch.randn(2, sizes.index.head_dim, dtype=sizes.dtype, device=device)
    at = torch.tensor([length - 1, 7], dtype=torch.int32, device=device)
    ours, theirs = (mla_batch.Pages(pool=pages.pool.clone(), table=pages.table) for _ in range(2))
    by_device.dsa(device).write_keys(values, at, ours)
    dsa_batch.write_keys(values, at, theirs)
    assert torch.equal(ours.pool, theirs.pool), "index keys are written as the twin writes them"
    for queries, table in ((2, pages.table), (8, pages.table[:1])):
        of = mla_batch.Pages(pool=pages.pool, table=table)
        codes, weights = inputs.index_queries(sizes, queries)
        seen = torch.randint(1, length + 1, (queries,), dtype=torch.int32, device=device).sort().values
        visible = torch.arange(length, device=device) < seen[:, None]
        made = _twice(lambda: by_device.dsa(device).scores(codes, weights, of, seen, length)[visible])  # noqa: B023
        keys = dsa_batch.read_keys(of, length).double().repeat_interleave(queries // len(table), 0)
        raw = torch.einsum("tsd,thd->tsh", keys, codes.double()).relu()
        gold = torch.einsum("tsh,th->ts", raw, weights.double())[visible]
        name = f"index scores, {queries} queries of {len(table)} sequences,"
        yield _error(name, made, gold, SCORES_ERROR_MAX, "DeepGEMM")


def _check_top_k(sizes: Sizes, length: int) -> None:
    """The very set and order, of normal scores and of few distinct ones, one row all equal, ragged."""
    pages = inputs.rows(sizes, 1, length)
    for values in (inputs.row_values(sizes, 5, length), inputs.row_values(sizes, 5, length).mul_(4).round_()):
        values[4] = 0.5
        seen = torch.tensor([length, length // 2, 100, 1, length], dtype=torch.int32, device=sizes.device)
        found = by_device.dsa(sizes.device).top_k(values, seen, sizes.index.top_k, pages)
        right = dsa_batch.top_k(values, seen, sizes.index.top_k, pages)
        assert torch.equal(found.positions, right.positions), "top-k chooses the very set"
        assert torch.equal(found.counts, right.counts), "top-k counts what it chose"
        there = right.positions >= 0
        assert torch.equal(found.slots[there], right.slots[there]), "top-k names the pool's rows"

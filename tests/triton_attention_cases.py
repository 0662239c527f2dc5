"""Runs the attention kernels under Triton's interpreter on small random inputs in fp32 and prints each case's largest
relative error against its twin as JSON (0 or 1 where bits must agree). A program of its own, as `triton_cases.py`.
"""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from forebay.kernels import dsa_batch, dsa_triton, mla_batch, mla_triton, reference
from forebay.kernels.bench_inputs import relative
from forebay.kernels.mla_batch import Pages

RANK, PE, NOPE, VALUE, PAGE = 32, 16, 32, 32, 64
SCALE = (NOPE + PE) ** -0.5


def paged(sequences: int, pages: int, width: int = RANK + PE, tokens: int = PAGE) -> Pages:
    """Random rows, pages in random order, of which sequences share some; what belongs to nobody is not a number."""
    table = torch.stack([torch.randperm(sequences * pages)[:pages] for _ in range(sequences)]).int() + 1
    pool = torch.full((sequences * pages + 2, tokens, width), float("nan"))
    pool[table.long().flatten()] = torch.randn(sequences * pages, tokens, width)
    return Pages(pool=pool, table=table)


def latent(lengths: tuple[int, ...], heads: int, parts: int) -> float:
    """Ragged batch; rows behind a length, and a page's unwritten ones, are not numbers."""
    pages, seen = paged(len(lengths), -(-max(lengths) // PAGE)), torch.tensor(lengths, dtype=torch.int32)
    free = torch.ones(pages.pool.shape[:2], dtype=torch.bool)
    for n, length in enumerate(lengths):
        free.view(-1)[pages.slots(torch.arange(length).expand(len(lengths), -1))[n]] = False
    pages.pool[free] = float("nan")
    q = torch.randn(len(lengths), heads, RANK + PE)
    tuning = dataclasses.replace(mla_triton.TUNED, parts=parts)
    found = mla_triton.attend(q, pages, seen, SCALE, RANK, tuning)
    return relative(found, mla_batch.attend(q, pages, seen, SCALE, RANK))


def chosen_rows(heads: int, parts: int, sequences: int) -> float:
    """Several queries of each sequence, each with slots of its own; fewer than k for some."""
    pages, queries, k = paged(sequences, 3), 4, 80
    counts = torch.tensor([1, 31, 64, 80], dtype=torch.int32)
    positions = torch.stack([torch.randperm(3 * PAGE)[:k].sort().values for _ in range(queries)])
    slots = pages.slots(positions).int().masked_fill(torch.arange(k) >= counts[:, None], 2**30)
    q = torch.randn(queries, heads, RANK + PE) * 3
    tuning = dataclasses.replace(mla_triton.TUNED, parts=parts)
    found = mla_triton.attend_slots(q, pages, slots, counts, SCALE, RANK, tuning)
    return relative(found, mla_batch.attend_slots(q, pages, slots, counts, SCALE, RANK))


def all_rows_chosen() -> float:
    """Top-k of at least the length reads what dense attention reads, to the bit."""
    pages, lengths = paged(3, 2), torch.tensor([5, 64, 100], dtype=torch.int32)
    q = torch.randn(3, 8, RANK + PE)
    chosen = dsa_triton.top_k(torch.randn(3, 2 * PAGE), lengths, 2 * PAGE, pages)
    tuning = dataclasses.replace(mla_triton.TUNED, parts=2)
    sparse = mla_triton.attend_slots(q, pages, chosen.slots, chosen.counts, SCALE, RANK, tuning)
    return 0.0 if torch.equal(sparse, mla_triton.attend(q, pages, lengths, SCALE, RANK, tuning)) else 1.0


def prefill(start: int, tokens: int, segment: int) -> float:
    pages, heads = paged(1, -(-(start + tokens) // PAGE)), 2
    q = torch.randn(tokens, heads, NOPE + PE)
    w_uk, w_uv = torch.randn(heads, NOPE, RANK) * RANK**-0.5, torch.randn(heads, RANK, VALUE) * RANK**-0.5
    tuning = dataclasses.replace(mla_triton.TUNED, prefill_queries=32, prefill_tile=16)
    found = mla_triton.prefill(q, pages, w_uk, w_uv, start, tuning, segment)
    rows = pages.take(pages.slots(torch.arange(start + tokens)[None])[0])
    gold = reference.attend_prefill(q.double(), rows.double(), w_uk.double(), w_uv.double(), start)
    return max(relative(found, gold), relative(found, mla_batch.prefill(q, pages, w_uk, w_uv, start)))


def keys(sequences: int, length: int) -> Pages:
    """Pages of random keys written by the twin; behind the length any bytes but no number of them huge."""
    table = torch.randperm(sequences * 2).view(sequences, 2).int() + 1
    pages = Pages(pool=torch.randint(0, 64, (sequences * 2 + 2, 128, 36)).byte(), table=table)
    values = torch.randn(sequences * length, 32) * torch.logspace(-2, 2, length).repeat(sequences)[:, None]
    dsa_batch.write_keys(values, torch.arange(length).int().repeat(sequences), pages)
    return pages


def write() -> float:
    """Codes, scales and bytes beside them as the twin leaves them; tiny, subnormal, zero and large keys among them."""
    pages = keys(3, 150)
    own = dataclasses.replace(pages, pool=pages.pool.clone())
    values = torch.randn(9, 32) * torch.tensor([0, 1e-9, 1e-4, 1e-3, 0.02, 1, 30, 448, 1e5])[:, None]
    values[5, 1:] *= 2.0**-9
    at = torch.tensor([0, 63, 64, 150, 191, 192, 255, 1, 2]).int()
    dsa_triton.write_keys(values, at, own)
    dsa_batch.write_keys(values, at, pages)
    return 0.0 if torch.equal(own.pool, pages.pool) else 1.0


def queries() -> float:
    q, w = torch.randn(5, 16, 32) * torch.logspace(-3, 3, 16)[:, None], torch.randn(5, 16)
    codes, weights = dsa_triton.quantize_queries(q, w)
    right, right_weights = dsa_batch.quantize_queries(q, w)
    same = torch.equal(codes.view(torch.uint8), right.view(torch.uint8))
    return relative(weights, right_weights) if same else 1.0


def scores(sequences: int, each: int) -> float:
    """Decode (one query of each sequence) and prefill (several of one)."""
    pages = keys(sequences, 200)
    pages.table[:, 0] = pages.table[0, 0]  # a page that all share
    codes, weights = dsa_batch.quantize_queries(
        torch.randn(sequences * each, 16, 32), torch.randn(sequences * each, 16)
    )
    lengths = torch.randint(1, 201, (sequences * each,)).int()
    found = dsa_triton.scores(codes, weights, pages, lengths, 200)
    right = dsa_batch.scores(codes, weights, pages, lengths, 200)
    seen = torch.arange(200) < lengths[:, None]
    return relative(found[seen], right[seen])


def top_k(rows: Tensor, k: int, block: int = 4096, pieces: int = 32, sequences: int = 1) -> float:
    """Ragged rows against sorting; and the slots that belong to the positions."""
    T, S = rows.shape
    pages, lengths = paged(sequences, -(-S // PAGE)), torch.randint(0, S + 1, (T,)).int()
    lengths[0] = S
    tuning = dataclasses.replace(dsa_triton.TUNED, block=block, pieces=pieces)
    found = dsa_triton.top_k(rows, lengths, k, pages, tuning)
    right = dsa_batch.top_k(rows, lengths, k, pages)
    seen = rows.masked_fill(torch.arange(S) >= lengths[:, None], float("-inf"))
    there = right.positions >= 0
    same = (
        torch.equal(found.positions.long(), reference.top_k(seen, k))
        and torch.equal(found.positions, right.positions)
        and torch.equal(found.counts, right.counts)
        and torch.equal(found.slots[there], right.slots[there])
    )
    return 0.0 if same else 1.0


def ties(T: int, S: int) -> Tensor:
    """Few distinct values, both zeros and nothings among them, and a row that is all equal."""
    rows = torch.randint(-2, 3, (T, S)).float() * -0.5
    rows[torch.rand(T, S) < 0.1] = float("-inf")
    rows[0] = 0.25
    return rows


CASES: dict[str, Callable[[], float]] = {
    "latent-heads-8": lambda: latent((1, 31, 32, 100), 8, 1),
    "latent-heads-8-parts": lambda: latent((1, 33, 128, 191), 8, 3),
    "latent-heads-96-parts": lambda: latent((70, 5), 96, 2),
    "latent-heads-96-whole": lambda: latent((65, 64), 96, 1),
    "slots-heads-8": lambda: chosen_rows(8, 2, 4),
    "slots-heads-96-of-one-sequence": lambda: chosen_rows(96, 1, 1),
    "slots-of-all-rows": all_rows_chosen,
    "prefill": lambda: prefill(0, 70, 256),
    "prefill-start-segments": lambda: prefill(75, 50, 64),
    "prefill-one-token": lambda: prefill(64, 1, 32),
    "keys-written": write,
    "queries-quantized": queries,
    "scores-decode": lambda: scores(3, 1),
    "scores-prefill": lambda: scores(1, 8),
    "scores-prefill-uneven": lambda: scores(1, 6),
    "scores-several-each": lambda: scores(2, 4),
    "top-k": lambda: top_k(torch.randn(4, 272), 13),
    "top-k-ties": lambda: top_k(ties(4, 272), 13),
    "top-k-more-than-there-are": lambda: top_k(torch.randn(3, 48), 64),
    "top-k-pieces": lambda: top_k(torch.randn(4, 400), 16, 64),
    "top-k-pieces-ties": lambda: top_k(ties(4, 400), 16, 64, sequences=2),
    "top-k-pieces-of-blocks": lambda: top_k(torch.randn(4, 400), 16, 16, 4),
    "top-k-pieces-of-blocks-ties": lambda: top_k(ties(4, 400), 16, 16, 4),
}
LARGE: dict[str, Callable[[], float]] = {
    "top-k-large": lambda: top_k(torch.randn(4, 65536), 2048),
    "top-k-large-ties": lambda: top_k(torch.randint(0, 50, (4, 65536)).float(), 2048),
    "top-k-large-pieces": lambda: top_k(torch.randn(2, 65536), 2048, 8192, 4),
    "top-k-bunched": lambda: top_k(torch.arange(65536.0).flip(0)[None] + torch.rand(2, 1), 2048),
    "latent-large": lambda: latent((1, 700, 1024, 2000), 96, 8),
    "prefill-large": lambda: prefill(700, 300, 512),
}


def golden_attention(folder: Path, form: str, indices: str) -> float:
    """Independent figures of one sequence; its 8 shared dimensions are filled up with zeros to 16."""
    t = load_file(folder / "sparse_attention.safetensors")
    q, rows, idx = (t[name][0] for name in ("q_mqa", "kv_latent", indices))
    tokens, rank = len(rows), t[f"{form}.out_latent"].shape[-1]
    pool = F.pad(rows, (0, 8, 0, PAGE - tokens))[None]
    pages = Pages(pool=pool, table=torch.zeros(1, 1, dtype=torch.int32))
    counts = (idx >= 0).sum(1).int()
    slots = idx.clamp(min=0).int().contiguous()
    found = mla_triton.attend_slots(F.pad(q, (0, 8)), pages, slots, counts, 24**-0.5, rank)
    return relative(found, t[f"{form}.out_latent"][0])


def golden_top_k(folder: Path) -> float:
    """Independent choices among an indexer's scores, position by position."""
    t = load_file(folder / "indexer_k3like.safetensors")
    scores, right = t["nope.prefill_scores"][0], t["nope.prefill_topk"][0]
    tokens = len(scores)
    rows = torch.zeros(tokens, -(-tokens // 16) * 16)
    rows[:, :tokens] = scores
    pages, lengths = paged(1, -(-tokens // PAGE)), torch.arange(1, tokens + 1).int()
    found = dsa_triton.top_k(rows[:, :tokens], lengths, right.shape[1], pages)
    return 0.0 if torch.equal(found.positions.long(), right.long()) else 1.0


GOLDEN: dict[str, Callable[[Path], float]] = {
    "sparse": lambda folder: golden_attention(folder, "sparse", "topk_indices"),
    "dense": lambda folder: golden_attention(folder, "dense", "topk_indices_full"),
    "top-k": golden_top_k,
}

if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if "GOLDEN" in os.environ:
        print(json.dumps({name: case(Path(os.environ["GOLDEN"])) for name, case in GOLDEN.items()}))
    else:
        print(json.dumps({name: case() for name, case in (LARGE if "LARGE" in os.environ else CASES).items()}))

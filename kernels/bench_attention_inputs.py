"""Random inputs of the attention's measurements, fresh at every run: pages in random order, keys quantized on write."""

from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.kernels import by_device, costs
from forebay.kernels.dsa_batch import Chosen
from forebay.kernels.mla_batch import Pages
from forebay.kernels.models import K3_1_PRO
from forebay.kernels.shapes import IndexShape, MlaShape

CACHE_BLOCK = 512  # tokens: of a released cache, of which pages hold whole ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a measurement is made at: one global layer's shapes, and tokens of a page of rows and of keys."""

    mla: MlaShape
    index: IndexShape
    dtype: torch.dtype
    device: torch.device
    row_page: int
    key_page: int

    @property
    def width(self) -> int:
        return self.mla.row_elements

    @property
    def scale(self) -> float:
        return float(self.mla.query_dim**-0.5)


def released(device: torch.device, ranks: int = 1) -> Sizes:
    """K3.1 Pro's layer on one of `ranks` ranks, with the pages that its states ask for."""
    shape, row = K3_1_PRO, costs.latent_row_bytes(K3_1_PRO)
    key, index, m = costs.index_row_bytes(shape), shape.index, shape.mla
    assert index is not None
    assert key is not None
    row_page = -(-costs.state_bytes(shape, ranks) // (CACHE_BLOCK * row)) * CACHE_BLOCK
    heads = m.heads // ranks
    mla = MlaShape(
        heads=heads, q_rank=m.q_rank, kv_rank=m.kv_rank, nope_dim=m.nope_dim, pe_dim=m.pe_dim, value_dim=m.value_dim,
        out_gate=m.out_gate,
    )  # fmt: skip
    key_page = row_page * row // key // CACHE_BLOCK * CACHE_BLOCK
    return Sizes(mla=mla, index=index, dtype=torch.bfloat16, device=device, row_page=row_page, key_page=key_page)


def small(device: torch.device) -> Sizes:
    """What shows on a CPU that everything runs."""
    mla = MlaShape(heads=4, q_rank=None, kv_rank=32, nope_dim=32, pe_dim=16, value_dim=32, out_gate=True)
    index = IndexShape(heads=16, head_dim=32, top_k=64, key_dtype="fp8")
    return Sizes(mla=mla, index=index, dtype=torch.float32, device=device, row_page=128, key_page=128)


def _table(sequences: int, length: int, page: int, device: torch.device) -> Tensor:
    pages = -(-length // page)
    return torch.randperm(sequences * pages, device=device).view(sequences, pages).int()


def rows(sizes: Sizes, sequences: int, length: int) -> Pages:
    """Latent rows of `sequences` of `length` tokens."""
    table = _table(sequences, length, sizes.row_page, sizes.device)
    shape = (table.numel(), sizes.row_page, sizes.width)
    return Pages(pool=torch.randn(shape, dtype=sizes.dtype, device=sizes.device), table=table)


def keys(sizes: Sizes, sequences: int, length: int) -> Pages:
    """Index keys, written by the device's own kernel, sequence by sequence."""
    dim, device = sizes.index.head_dim, sizes.device
    table = _table(sequences, length, sizes.key_page, device)
    pool = torch.zeros((table.numel(), sizes.key_page, dim + costs.FP8_SCALE_BYTES), dtype=torch.uint8, device=device)
    made, positions = Pages(pool=pool, table=table), torch.arange(length, dtype=torch.int32, device=device)
    for n in range(sequences):
        values = torch.randn(length, dim, dtype=sizes.dtype, device=device)
        by_device.dsa(device).write_keys(values, positions, Pages(pool=pool, table=table[n : n + 1]))
    return made


def index_queries(sizes: Sizes, queries: int) -> tuple[Tensor, Tensor]:
    """Quantized: codes [T, Hi, Di] and weights [T, Hi]. Heads' weights are positive and negative."""
    q = torch.randn(queries, sizes.index.heads, sizes.index.head_dim, dtype=sizes.dtype, device=sizes.device)
    w = torch.randn(queries, sizes.index.heads, dtype=sizes.dtype, device=sizes.device)
    made: tuple[Tensor, Tensor] = by_device.dsa(sizes.device).quantize_queries(q, w)
    return made


def absorbed(sizes: Sizes, queries: int) -> Tensor:
    """Absorbed queries [T, H, r+pe], whose scores spread by a few."""
    return torch.randn(queries, sizes.mla.heads, sizes.width, dtype=sizes.dtype, device=sizes.device)


def row_values(sizes: Sizes, queries: int, length: int) -> Tensor:
    """Scores fp32 [T, length], normally distributed; rows begin on multiples of 16, as `scores` leaves them."""
    return torch.randn(queries, -(-length // 16) * 16, device=sizes.device)[:, :length]


def lengths(sizes: Sizes, queries: int, length: int) -> Tensor:
    return torch.full((queries,), length, dtype=torch.int32, device=sizes.device)


def chosen(sizes: Sizes, pages: Pages, queries: int, length: int) -> Chosen:
    """top_k random rows of each query's sequence."""
    values, seen = row_values(sizes, queries, length), lengths(sizes, queries, length)
    made: Chosen = by_device.dsa(sizes.device).top_k(values, seen, sizes.index.top_k, pages)
    return made

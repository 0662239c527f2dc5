"""Contexts without a prefill: pages of random rows, index keys and states, as many and as large as a prefill's.

For measurements: how long a step or a prefill takes depends on how much of a context there is, not on what it says.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forebay.kernels import dsa
from forebay.kernels.shapes import ModelShape
from forebay.kvstore.device import DevicePool
from forebay.kvstore.layout import INDEX, LATENT, Layout
from forebay.workers.attention import key_row
from forebay.workers.step_pages import PageTable

STATE_STD = 0.05
KEYS_AT_ONCE = 1 << 20

WriteKeys = Callable[[Tensor, Tensor], None]
"""Puts fp32 keys [n, page_tokens, D] into fp8 pages uint8 [n, page_tokens, D + 4], as the engine reads them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contexts:
    """B sequences of `tokens` tokens each, with pages for `capacity` tokens."""

    pool: DevicePool
    tables: tuple[PageTable, ...]
    tokens: int
    capacity: int


def write_key_rows(keys: Tensor, pages: Tensor) -> None:
    """As exact mode lays them: a token's codes, then its scale."""
    pages.copy_(dsa.quantize_keys(keys))


def empty_contexts(layout: Layout, device: torch.device, batch: int, capacity: int) -> Contexts:
    """Sequences without a token: states are zeros. A sequence's pages lie apart, in no order."""
    tables: list[PageTable] = [{} for _ in range(batch)]
    first, random = 0, np.random.default_rng(batch)
    for name, layers, pages in _groups(layout, capacity):
        each = len(layers) * pages
        ids = first + random.permutation(batch * each).astype(np.int32).reshape(batch, len(layers), pages)
        for table, own in zip(tables, ids, strict=True):
            table[name] = own
        first += batch * each
    return Contexts(pool=DevicePool(layout, first, device), tables=tuple(tables), tokens=0, capacity=capacity)


def made_contexts(
    shape: ModelShape,
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device,
    batch: int,
    tokens: int,
    capacity: int,
    write_keys: WriteKeys = write_key_rows,
) -> Contexts:
    """`batch` sequences of `tokens` tokens of which nothing was computed."""
    made = empty_contexts(layout, device, batch, capacity)
    random = torch.Generator(device).manual_seed(tokens)
    first = 0
    for name, layers, pages in _groups(layout, capacity):
        end = first + batch * len(layers) * pages
        if name == LATENT:
            made.pool.rows(LATENT, dtype, shape.mla.row_elements)[first:end].normal_(generator=random)
        elif name == INDEX:
            _fill_keys(made.pool, shape, slice(first, end), random, write_keys)
        else:
            _fill_states(made.pool, shape, dtype, slice(first, end), random)
        first = end
    return Contexts(pool=made.pool, tables=made.tables, tokens=tokens, capacity=capacity)


def _groups(layout: Layout, capacity: int) -> list[tuple[str, tuple[int, ...], int]]:
    """Name, layers, and pages that a sequence takes in each layer."""
    paged = [(group.name, group.layers, -(-capacity // group.page_tokens)) for group in layout.paged]
    return paged + [(group.name, group.layers, 1) for group in layout.states]


def _fill_keys(
    pool: DevicePool, shape: ModelShape, pages: slice, random: torch.Generator, write_keys: WriteKeys
) -> None:
    assert shape.index is not None
    row = key_row(shape.index)
    view = pool.rows(INDEX, row.dtype, row.elements)[pages]
    if shape.index.key_dtype == "fp32":
        view.normal_(generator=random)
        return
    for part in torch.split(view, max(1, KEYS_AT_ONCE // view.shape[1])):
        dims = (*part.shape[:2], shape.index.head_dim)
        write_keys(torch.empty(dims, device=view.device).normal_(generator=random), part)


def _fill_states(
    pool: DevicePool, shape: ModelShape, dtype: torch.dtype, pages: slice, random: torch.Generator
) -> None:
    k = shape.kda
    matrix = (k.heads, k.head_dim, k.head_dim)
    pool.field(torch.float32, matrix)[pages].normal_(0.0, STATE_STD, generator=random)
    tail = pool.field(dtype, (k.conv_width - 1, 3 * k.width), 4 * k.heads * k.head_dim**2)
    tail[pages].normal_(generator=random)

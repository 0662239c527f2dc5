"""The residual stream in fast mode: what `residual` has, with the add before and the norm behind in the same launch.

A stream hears every sublayer's outputs (`add`) and gives the next one's normed input (`normed`), in order: attention
and MLP of each layer, then the head.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from forebay.kernels import by_device
from forebay.kernels.attnres import Partials
from forebay.workers.residual import BlockQueries


class Stream(Protocol):
    """All tensors are [T, hidden]; outputs are summed."""

    def add(self, outputs: Sequence[Tensor]) -> None: ...
    def normed(self, consumer: int, norm: Tensor) -> Tensor: ...


class PlainStream:
    def __init__(self, embedding: Tensor, eps: float) -> None:
        self._prefix, self._eps = embedding, eps
        self._outputs: Sequence[Tensor] = ()

    def add(self, outputs: Sequence[Tensor]) -> None:
        self._outputs = outputs

    def normed(self, consumer: int, norm: Tensor) -> Tensor:
        small = by_device.layer(self._prefix.device)
        self._prefix, x = small.add_norm(self._prefix, self._outputs, norm, self._eps)
        self._outputs = ()
        made: Tensor = x
        return made


class BlockStream:
    """`residual.BlockResidual`'s two phases. Consumer 2·l is layer l's attention, 2·l + 1 its MLP."""

    def __init__(self, embedding: Tensor, queries: BlockQueries) -> None:
        self._prefix, self._queries = embedding, queries
        self._output: Tensor | None = None
        self._bank: list[Tensor] = []
        self._partials: Partials | None = None
        self._first = 0
        self._starts_block = False

    def add(self, outputs: Sequence[Tensor]) -> None:
        (output,) = outputs
        if self._starts_block:
            self._prefix, self._output, self._starts_block = output, None, False
        else:
            self._output = output

    def normed(self, consumer: int, norm: Tensor) -> Tensor:
        x = self._mixed(consumer, norm)
        layer, is_mlp = divmod(consumer, 2)
        if not is_mlp and layer % self._queries.block == 0 and consumer + 1 < len(self._queries.weights):
            self._append(layer)
        return x

    def _mixed(self, consumer: int, norm: Tensor) -> Tensor:
        eps, device = self._queries.eps, self._prefix.device
        if consumer == 0:
            first: Tensor = by_device.layer(device).add_norm(self._prefix, (), norm, eps)[1]
            return first
        assert self._partials is not None, "the bank is filled before layer 0's MLP asks"
        partial, weight = self._partials.query(consumer - self._first), self._queries.weights[consumer]
        merge = by_device.attnres(device).merge
        self._prefix, x = merge(partial, self._prefix, self._output, weight, eps, norm, eps)
        self._output = None
        made: Tensor = x
        return made

    def _append(self, layer: int) -> None:
        self._bank.append(self._prefix)
        self._starts_block = True
        self._first, end = self._queries.epoch(layer)
        ws = self._queries.weights[self._first : end]
        self._partials = by_device.attnres(self._prefix.device).inter(torch.stack(self._bank), ws, self._queries.eps)

"""The residual stream of a forward pass: plain addition (Kimi Linear), or block Attention Residuals (K3, K3.1).

Both kinds answer the same three questions of a layer: what attention reads, what the MLP reads, and where an
output is added. All tensors are [T, hidden]; rows never look at each other.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from forebay.kernels import attnres


@dataclass(slots=True)
class Trace:
    """What a checker may look at: the stream after the embedding and each layer, every mix with its sources, and the
    experts int64 [T, k] that each MoE layer chose."""

    prefixes: list[Tensor] = field(default_factory=list)
    mixes: list[tuple[tuple[Tensor, ...], Tensor, Tensor]] = field(default_factory=list)
    chosen: list[Tensor] = field(default_factory=list)


class Residual(Protocol):
    """One forward pass's stream. `before_*` and `final` return [T, hidden]; each layer asks in order."""

    prefix: Tensor

    def before_attention(self, layer: int) -> Tensor: ...
    def before_mlp(self, layer: int) -> Tensor: ...
    def add(self, output: Tensor) -> None: ...
    def final(self) -> Tensor: ...


class PlainResidual:
    """prefix <- prefix + output; everyone reads the prefix."""

    def __init__(self, embedding: Tensor) -> None:
        self.prefix = embedding

    def before_attention(self, layer: int) -> Tensor:
        return self.prefix

    def before_mlp(self, layer: int) -> Tensor:
        return self.prefix

    def add(self, output: Tensor) -> None:
        self.prefix = self.prefix + output

    def final(self) -> Tensor:
        return self.prefix


@dataclass(frozen=True, slots=True)
class BlockQueries:
    """The folded pseudo-queries (norm · proj) of a model, in the order in which a pass asks: attention and MLP of each
    layer, then the output. `weights` [2·layers + 1, hidden]; `block` counts layers."""

    weights: Tensor
    block: int
    eps: float

    def epoch(self, layer: int) -> tuple[int, int]:
        """The half-open run of pseudo-queries that see the bank as it stands after the append at `layer`."""
        return 2 * layer + 1, min(2 * (layer + self.block) + 1, len(self.weights))


class BlockResidual:
    """Block form in two phases. The bank holds the stream at every block's start; `prefix` is what the running block
    has added since. Scores against the bank are taken for a whole block's pseudo-queries at once, right after the
    bank has grown; each mix then only merges the running prefix.

        layer l·block:  attention reads (old bank, prefix) · bank += prefix · prefix = attention's output
        otherwise:      attention reads (bank, prefix)                     · prefix += attention's output
        always:         MLP reads (bank, prefix)                           · prefix += MLP's output
    """

    def __init__(self, embedding: Tensor, queries: BlockQueries, trace: Trace | None = None) -> None:
        self.prefix = embedding
        self._queries, self._trace = queries, trace
        self._bank: list[Tensor] = []
        self._partials: attnres.Partials | None = None
        self._first = 0
        self._starts_block = False

    def before_attention(self, layer: int) -> Tensor:
        mixed = self.prefix if layer == 0 else self._mix(2 * layer)
        if layer % self._queries.block == 0:
            self._append(layer)
        return mixed

    def before_mlp(self, layer: int) -> Tensor:
        return self._mix(2 * layer + 1)

    def add(self, output: Tensor) -> None:
        self.prefix = output if self._starts_block else self.prefix + output
        self._starts_block = False

    def final(self) -> Tensor:
        return self._mix(len(self._queries.weights) - 1)

    def _append(self, layer: int) -> None:
        self._bank.append(self.prefix)
        self._starts_block = True
        self._first, end = self._queries.epoch(layer)
        bank = torch.stack(self._bank)
        self._partials = attnres.inter(bank, self._queries.weights[self._first : end], self._queries.eps)

    def _mix(self, query: int) -> Tensor:
        assert self._partials is not None, "the bank is filled before layer 0's MLP asks"
        weight = self._queries.weights[query]
        mixed = attnres.merge(self._partials.query(query - self._first), self.prefix, weight, self._queries.eps)
        if self._trace is not None:
            self._trace.mixes.append(((*self._bank, self.prefix), weight, mixed))
        return mixed

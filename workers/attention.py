"""A layer's attention over pages: projections, norms and gates around the few operators that look at other tokens.

Prefill and decode differ in those operators alone (`Chunked`, `Recurrent`); everything else here is the same code.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from forebay.kernels import conv, dsa, exact, kda, mla, norms
from forebay.kernels.shapes import IndexShape, ModelShape
from forebay.kvstore.device import DevicePool
from forebay.kvstore.layout import INDEX, LATENT
from forebay.workers.layers import GlobalWeights, KdaWeights
from forebay.workers.step_pages import PageTable, StepRows, StepStates

KEY_NORM_EPS = 1e-6
SPARSE_GATHER_BYTES = 64 << 20

Recurrence = tuple[Tensor, Tensor, Tensor]
"""KDA's output [M, H, V], the states [B, H, K, V] and the tails [B, W-1, C] after it."""


class KeyRow(NamedTuple):
    """One index key as it lies in a page."""

    dtype: torch.dtype
    elements: int

    @property
    def n_bytes(self) -> int:
        return self.dtype.itemsize * self.elements


def key_row(index: IndexShape) -> KeyRow:
    """fp32, or e4m3 codes and a 4-byte scale."""
    if index.key_dtype == "fp8":
        return KeyRow(torch.uint8, index.head_dim + 4)
    return KeyRow(torch.float32, index.head_dim)


class Forms(Protocol):
    """The operators that look at other tokens. M new tokens of B sequences; rows and keys are [B, S, ·] whole pages."""

    def recur(
        self, w: KdaWeights, qkv: Tensor, g: Tensor, beta: Tensor, states: Tensor, tails: Tensor
    ) -> Recurrence: ...
    def attend(self, q: Tensor, rows: Tensor, w: GlobalWeights) -> Tensor: ...
    def scores(self, q: Tensor, head_weights: Tensor, keys: Tensor) -> Tensor: ...


class Chunked:
    """T tokens of one sequence from position `start` on."""

    def __init__(self, start: int) -> None:
        self.start = start

    def recur(self, w: KdaWeights, qkv: Tensor, g: Tensor, beta: Tensor, states: Tensor, tails: Tensor) -> Recurrence:
        mixed, tail = conv.short_conv(qkv, w.conv, tails[0])
        q, k, v = mixed.view(len(qkv), 3, *g.shape[1:]).unbind(1)
        o, state = kda.chunk(q, k, v, g, beta, states[0])
        return o, state[None], tail[None]

    def attend(self, q: Tensor, rows: Tensor, w: GlobalWeights) -> Tensor:
        return mla.attend_prefill(q, rows[0, : self.start + len(q)], w.w_uk, w.w_uv, self.start)

    def scores(self, q: Tensor, head_weights: Tensor, keys: Tensor) -> Tensor:
        return dsa.index_scores(q, head_weights, keys[0, : self.start + len(q)], self.start)


class Recurrent:
    """One token of each of B sequences, whose `lengths` int64 [B] count it."""

    def __init__(self, lengths: Tensor) -> None:
        self.lengths = lengths

    def recur(self, w: KdaWeights, qkv: Tensor, g: Tensor, beta: Tensor, states: Tensor, tails: Tensor) -> Recurrence:
        mixed, tails = conv.short_conv_step(qkv, w.conv, tails)
        q, k, v = mixed.view(len(qkv), 3, *g.shape[1:]).unbind(1)
        o, states = kda.step(q, k, v, g, beta, states)
        return o, states, tails

    def attend(self, q: Tensor, rows: Tensor, w: GlobalWeights) -> Tensor:
        beyond = torch.arange(rows.shape[1], device=rows.device) >= self.lengths[:, None]
        # Recycled pages hold any bytes, NaN among them, and 0 · NaN is not 0.
        return mla.attend_decode(q, rows.masked_fill(beyond[..., None], 0.0), self.lengths, w.w_uk, w.w_uv)

    def scores(self, q: Tensor, head_weights: Tensor, keys: Tensor) -> Tensor:
        return dsa.index_scores_decode(q, head_weights, keys, self.lengths)


class Attention:
    """One step over M new tokens at `positions` int64 [M]. x [M, hidden] is a layer's normed input; both kinds of layer
    return [M, hidden], to be added to the stream, and leave their rows, keys and states in the pool."""

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        forms: Forms,
        pool: DevicePool,
        tables: Sequence[PageTable],
        positions: Tensor,
    ) -> None:
        self._shape, self._forms, self._positions = shape, forms, positions
        k = shape.kda
        tail = (k.conv_width - 1, 3 * k.width)
        self._states = StepStates(pool, (k.heads, k.head_dim, k.head_dim), tail, dtype, tables)
        self._rows = StepRows(pool, LATENT, dtype, shape.mla.row_elements, tables, positions)
        self._keys = None if shape.index is None else StepRows(pool, INDEX, *key_row(shape.index), tables, positions)

    def kda(self, w: KdaWeights, x: Tensor, layer: int) -> Tensor:
        k = self._shape.kda
        qkv, rank, beta, out_gate = torch.split(exact.linear(x, w.into), w.widths, dim=-1)
        decay = exact.linear(rank, w.decay_up).view(-1, k.heads, k.head_dim)
        g = kda.gate(decay, w.A_log, w.dt_bias, k.gate, k.gate_lower_bound)
        states, tails = self._states.read(layer)
        o, states, tails = self._forms.recur(w, qkv, g, exact.sigmoid(beta.float()), states, tails)
        self._states.write(layer, states, tails)
        if w.gate_up is not None:
            out_gate = exact.linear(out_gate, w.gate_up)
        gated = norms.gated_rms_norm(o, out_gate.reshape(o.shape), w.norm, self._shape.norm_eps)
        return exact.linear(gated.flatten(1), w.out)

    def latent(self, w: GlobalWeights, x: Tensor, place: int) -> Tensor:
        """`place` is the layer's place among the global layers."""
        m, eps = self._shape.mla, self._shape.latent_norm_eps
        query, c, shared, gate, key, head_weights = torch.split(exact.linear(x, w.into), w.widths, dim=-1)
        if w.query_up is not None and w.query_norm is not None:
            query = exact.linear(norms.rms_norm(query, w.query_norm, eps), w.query_up)
        q, index_q = query.tensor_split([m.heads * m.query_dim], dim=-1)
        q = q.reshape(-1, m.heads, m.query_dim)
        self._rows.write(place, torch.cat((norms.rms_norm(c, w.latent_norm, eps), shared), dim=-1))
        if w.key_norm is None:
            o = self._forms.attend(q, self._rows.read(place), w)
        else:
            chosen = self._choose(w.key_norm, index_q, key, head_weights, place)
            o = self._attend_chosen(q, chosen, w, place)
        flat = o.flatten(1)
        return exact.linear(flat * exact.sigmoid(gate) if m.out_gate else flat, w.out)

    def _choose(
        self, key_norm: tuple[Tensor, Tensor], q: Tensor, key: Tensor, head_weights: Tensor, place: int
    ) -> Tensor:
        """Writes the new tokens' index keys, then the positions int64 [M, top_k] that each token reads (-1: none)."""
        index, keys = self._shape.index, self._keys
        assert index is not None
        assert keys is not None
        rope = self._positions, index.rope_dim, index.rope_theta
        key = dsa.rope_half_split(norms.layer_norm(key, *key_norm, KEY_NORM_EPS).float(), *rope)
        keys.write(place, dsa.quantize_keys(key) if index.key_dtype == "fp8" else key)
        stored = keys.read(place)
        if index.key_dtype == "fp8":
            stored = dsa.dequantize_keys(stored)
        q = dsa.rope_half_split(q.reshape(-1, index.heads, index.head_dim), *rope)
        return dsa.top_k(self._forms.scores(q, head_weights, stored), index.top_k)

    def _attend_chosen(self, q: Tensor, chosen: Tensor, w: GlobalWeights, place: int) -> Tensor:
        """In runs of tokens whose gathered rows stay within a bound; a run is a multiple of 8 rows, so none shows."""
        row_bytes = self._rows.view.shape[2] * self._rows.view.element_size()
        run = max(1, SPARSE_GATHER_BYTES // (chosen.shape[1] * row_bytes) // exact.ROWS) * exact.ROWS
        parts = [
            dsa.sparse_attend(part, self._rows.take(place, idx.clamp(min=0)), idx, w.w_uk, w.w_uv)
            for part, idx in zip(torch.split(q, run), torch.split(chosen, run), strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

"""Fast mode: the same model by the device's fastest kernels, in bf16 on a GPU.

What it does not promise is exact mode's row contract: a row's last bits may depend on its company and on where a prompt
was split, since products choose their kernels by the number of rows. What it shares with exact mode: weights, pages and
their layout, and the two passes, so the same workers drive both. fp8 index keys lie in groups (`dsa_batch`).
"""

import hashlib
import logging
import time
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.kernels import kda, layer_parts
from forebay.kernels.dsa_batch import GROUP
from forebay.kernels.kda_plan import Plan, make_plan
from forebay.kernels.layer_parts import DensePart, GlobalPart, KdaPart
from forebay.kernels.shapes import ModelShape
from forebay.kvstore.device import DevicePool
from forebay.workers.fast_decode import Decoding
from forebay.workers.fast_places import Places, widths_of
from forebay.workers.fast_residual import BlockStream, PlainStream, Stream
from forebay.workers.fast_weights import fast_layer
from forebay.workers.layers import ModelWeights
from forebay.workers.model import model_layout
from forebay.workers.residual import BlockQueries
from forebay.workers.step_pages import PageTable

log = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Batches for which a decode step is captured; a batch between two goes with the larger."""

Chosen = list[Tensor]
Attend = Callable[[KdaPart | GlobalPart, Tensor], Tensor]


class FastModel:
    """A `SequenceModel` without its promise of exactness."""

    def __init__(self, shape: ModelShape, weights: ModelWeights, block_tokens: int, weights_digest: bytes) -> None:
        assert block_tokens % kda.CHUNK == 0, "a block ends on the chunk grid"
        assert shape.index is None or shape.index.key_dtype == "fp8", "the indexer's kernels read fp8 keys"
        self.shape, self.dtype, self.device = shape, weights.embedding.dtype, weights.embedding.device
        self.layout = model_layout(shape, block_tokens, self.dtype, 1 if shape.index is None else GROUP)
        self.fingerprint = hashlib.sha256(
            f"fast {shape} {self.dtype} {self.layout.signature}".encode() + weights_digest
        ).digest()
        self._layers = [fast_layer(layer, shape) for layer in weights.layers]
        self._embedding, self._norm, self._head = weights.embedding, weights.norm, weights.head
        queries, block = weights.residual_queries, shape.attn_res_block
        self._queries = None if queries is None or block is None else BlockQueries(queries, block, shape.norm_eps)
        self._plans: dict[int, Plan] = {}
        self._decodings: weakref.WeakKeyDictionary[DevicePool, dict[tuple[int, ...], Decoding]] = (
            weakref.WeakKeyDictionary()
        )

    def prefill(self, ids: Tensor, start: int, pages: PageTable, pool: DevicePool) -> Tensor:
        """`Model.prefill` of one chunk: logits fp32 [V] of its last token. The host waits for nothing in it."""
        assert start % self.layout.block_tokens == 0, "prefill starts at a block's end"
        places = Places(self.shape, pool, 1, {group.name: pages[group.name].shape[1] for group in self.layout.paged})
        places.fill([pages])
        states = iter(places.state_pages(pages).tolist())
        lengths = torch.arange(start + 1, start + 1 + len(ids), dtype=torch.int32, device=self.device)
        plan = self._plan(len(ids))

        def attention(part: KdaPart | GlobalPart, x: Tensor) -> Tensor:
            if isinstance(part, KdaPart):
                return layer_parts.kda_prefill(part, x, plan, next(states))
            return layer_parts.attend(part, x, lengths, self.shape, start)

        hidden = self._run(ids, places.bind(self._layers, self.dtype), attention, None)
        return F.linear(hidden[-1:], self._head)[0].float()

    def decode(self, ids: Tensor, positions: Sequence[int], pages: Sequence[PageTable], pool: DevicePool) -> Tensor:
        """`Model.decode`: logits fp32 [B, V]."""
        decoding = self.decoding(ids, positions, pages, pool)
        decoding.step()
        return decoding.logits[: len(positions)].float()

    def decoding(self, ids: Tensor, positions: Sequence[int], pages: Sequence[PageTable], pool: DevicePool) -> Decoding:
        """A batch ready for its next steps, as many as its pages have room for. It holds until the next call."""
        batch = len(positions)
        if self.device.type == "cuda":
            batch = next(size for size in BUCKETS if size >= batch)
        widths = widths_of(pages, pool)
        of_pool = self._decodings.setdefault(pool, {})
        key = (batch, *widths.values())
        if key not in of_pool:
            of_pool[key] = self._new_decoding(pool, batch, widths)
        of_pool[key].fill(ids, positions, pages)
        return of_pool[key]

    def chosen(
        self, ids: Tensor, positions: Sequence[int], pages: Sequence[PageTable], pool: DevicePool
    ) -> list[Tensor]:
        """The experts [B, k] that a step chooses in each MoE layer. The step is made: rows and states move on."""
        places = Places(self.shape, pool, len(positions), widths_of(pages, pool))
        places.fill(pages)
        lengths = torch.tensor(positions, dtype=torch.int32, device=self.device) + 1
        chosen: Chosen = []
        self._step(ids, lengths, places.bind(self._layers, self.dtype), chosen)
        return chosen

    def _new_decoding(self, pool: DevicePool, batch: int, widths: dict[str, int]) -> Decoding:
        began = time.monotonic()
        places = Places(self.shape, pool, batch, widths)
        decoding = Decoding(pool, places, batch)
        parts = places.bind(self._layers, self.dtype)
        decoding.prepare(lambda: self._step(decoding.ids, decoding.lengths, parts, None))
        log.info("decode step for a batch of %d is ready after %.1f s", batch, time.monotonic() - began)
        return decoding

    def _step(
        self, ids: Tensor, lengths: Tensor, parts: Sequence[KdaPart | GlobalPart], chosen: Chosen | None
    ) -> Tensor:
        def attention(part: KdaPart | GlobalPart, x: Tensor) -> Tensor:
            if isinstance(part, KdaPart):
                return layer_parts.kda_step(part, x)
            return layer_parts.attend(part, x, lengths, self.shape)

        return F.linear(self._run(ids, parts, attention, chosen), self._head)

    def _run(
        self,
        ids: Tensor,
        parts: Sequence[KdaPart | GlobalPart],
        attention: Attend,
        chosen: Chosen | None,
    ) -> Tensor:
        """What the head reads, [T, hidden]."""
        stream = self._stream(self._embedding[ids])
        for number, (layer, part) in enumerate(zip(self._layers, parts, strict=True)):
            stream.add((attention(part, stream.normed(2 * number, layer.attention_norm)),))
            x = stream.normed(2 * number + 1, layer.mlp_norm)
            if isinstance(layer.mlp, DensePart):
                stream.add(layer_parts.dense(layer.mlp, x, self.shape))
            else:
                stream.add(layer_parts.mix(layer.mlp, x, self.shape, chosen))
        return stream.normed(2 * len(self._layers), self._norm)

    def _stream(self, embedding: Tensor) -> Stream:
        if self._queries is None:
            return PlainStream(embedding, self.shape.norm_eps)
        return BlockStream(embedding, self._queries)

    def _plan(self, tokens: int) -> Plan:
        if tokens not in self._plans:
            self._plans[tokens] = make_plan((tokens,), device=self.device)
        return self._plans[tokens]

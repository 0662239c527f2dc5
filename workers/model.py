"""The model: one forward pass for Kimi Linear, Kimi K3 and K3.1, over rows and states that live in a `DevicePool`.

    embedding -> [ attention (KDA, or latent attention, dense or sparse) -> MLP (dense, or experts) ] x layers -> logits

`prefill` runs T tokens of one sequence in the chunked forms, `decode` one token of each of B sequences in the recurrent
ones; between them only the attention differs. A row of either never depends on the rows beside it, nor on where a
prompt was split at block ends.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from forebay.kernels import exact, kda, moe, norms
from forebay.kernels.shapes import KeyDtype, ModelShape
from forebay.kvstore.device import DevicePool
from forebay.kvstore.layout import Layout, make_layout
from forebay.workers import demo
from forebay.workers.attention import Attention, Chunked, Recurrent, key_row
from forebay.workers.hf_config import read_config
from forebay.workers.layers import DenseWeights, KdaWeights, ModelWeights, MoeWeights, load_weights
from forebay.workers.residual import BlockQueries, BlockResidual, PlainResidual, Residual, Trace
from forebay.workers.step_pages import PageTable
from forebay.workers.weights import check_folder

log = logging.getLogger(__name__)


class Model:
    """Weights, and the two passes over them. `fingerprint` names everything that a cached byte depends on."""

    def __init__(self, shape: ModelShape, weights: ModelWeights, block_tokens: int, weights_digest: bytes) -> None:
        assert block_tokens % kda.CHUNK == 0, "a block ends on the chunk grid"
        self.shape, self.weights = shape, weights
        self.dtype, self.device = weights.embedding.dtype, weights.embedding.device
        self.layout = model_layout(shape, block_tokens, self.dtype)
        facts = f"{shape} {self.dtype} {self.layout.signature}".encode()
        self.fingerprint = hashlib.sha256(facts + weights_digest).digest()
        queries = weights.residual_queries
        block = shape.attn_res_block
        self._queries = None if queries is None or block is None else BlockQueries(queries, block, shape.norm_eps)
        self._place = {layer: place for place, layer in enumerate(shape.global_layers)}

    def prefill(
        self,
        ids: Tensor,
        start: int,
        pages: PageTable,
        pool: DevicePool,
        all_logits: bool = False,
        trace: Trace | None = None,
    ) -> Tensor:
        """Tokens ids int64 [T] at positions start … of one sequence, `start` at a block's end.

        Writes their rows and keys and moves the running state on, in place (at start 0 the state must be zeros).
        Returns fp32 logits [V] of the last token, or [T, V].
        """
        assert start % self.layout.block_tokens == 0, "prefill starts at a block's end"
        positions = torch.arange(start, start + len(ids), device=self.device)
        attention = Attention(self.shape, self.dtype, Chunked(start), pool, [pages], positions)
        hidden = self._run(ids, attention, trace)
        return self._logits(hidden) if all_logits else self._logits(hidden[-1:])[0]

    def decode(
        self,
        ids: Tensor,
        positions: Sequence[int],
        pages: Sequence[PageTable],
        pool: DevicePool,
        trace: Trace | None = None,
    ) -> Tensor:
        """A token of each of B sequences: ids int64 [B] at `positions`, each with its own pages. Logits fp32 [B, V]."""
        places = torch.tensor(positions, dtype=torch.int64, device=self.device)
        attention = Attention(self.shape, self.dtype, Recurrent(places + 1), pool, pages, places)
        return self._logits(self._run(ids, attention, trace))

    def _run(self, ids: Tensor, attention: Attention, trace: Trace | None) -> Tensor:
        """The stream [T, hidden] after the last layer, before the final norm."""
        stream = self._residual(self.weights.embedding[ids], trace)
        eps = self.shape.norm_eps
        for number, layer in enumerate(self.weights.layers):
            _record(trace, stream)
            x = norms.rms_norm(stream.before_attention(number), layer.attention_norm, eps)
            if isinstance(layer.attention, KdaWeights):
                stream.add(attention.kda(layer.attention, x, number))
            else:
                stream.add(attention.latent(layer.attention, x, self._place[number]))
            x = norms.rms_norm(stream.before_mlp(number), layer.mlp_norm, eps)
            stream.add(_mlp(layer.mlp, x, self.shape, trace))
        _record(trace, stream)
        return stream.final()

    def _residual(self, embedding: Tensor, trace: Trace | None) -> Residual:
        return PlainResidual(embedding) if self._queries is None else BlockResidual(embedding, self._queries, trace)

    def _logits(self, hidden: Tensor) -> Tensor:
        return exact.linear(norms.rms_norm(hidden, self.weights.norm, self.shape.norm_eps), self.weights.head).float()


def _record(trace: Trace | None, stream: Residual) -> None:
    if trace is not None:
        trace.prefixes.append(stream.prefix)


def model_layout(shape: ModelShape, block_tokens: int, dtype: torch.dtype, index_together: int = 1) -> Layout:
    """How the model's rows, index keys (of so many tokens together) and states (fp32, then a tail in `dtype`) lie in
    pages."""
    tail = (shape.kda.conv_width - 1) * 3 * shape.kda.width * dtype.itemsize
    return make_layout(
        block_tokens=block_tokens,
        global_layers=shape.global_layers,
        kda_layers=shape.kda_layers,
        latent_row_bytes=shape.mla.row_elements * dtype.itemsize,
        index_row_bytes=None if shape.index is None else key_row(shape.index).n_bytes,
        state_bytes=4 * shape.kda.heads * shape.kda.head_dim**2 + tail,
        index_together=index_together,
    )


def digest_files(files: Sequence[Path]) -> bytes:
    """A digest of the files' bytes, in the given order."""
    from blake3 import blake3  # not needed where weights come from no file

    digest = blake3(max_threads=blake3.AUTO)
    for file in files:
        digest.update_mmap(file)
    return digest.digest()


def _mlp(w: DenseWeights | MoeWeights, x: Tensor, shape: ModelShape, trace: Trace | None) -> Tensor:
    if isinstance(w, DenseWeights):
        gate, up = exact.linear(x, w.into).chunk(2, dim=-1)
        return exact.linear(moe.glu(gate, up, shape), w.out)
    gate, up, latent = torch.split(exact.linear(x, w.into), w.widths, dim=-1)
    chosen, weights = moe.route(x, w.router, w.bias, shape.moe.per_token, shape.moe.scaling, shape.moe.renormalize)
    if trace is not None:
        trace.chosen.append(chosen)
    routed = moe.experts(x if shape.moe.latent is None else latent, chosen, weights, w.experts, shape)
    if w.norm is not None:
        routed = norms.rms_norm(routed, w.norm, shape.norm_eps)
    shared = moe.glu(gate, up, shape)
    if shape.moe.latent is None:
        return exact.linear(shared, w.out) + routed
    return exact.linear(torch.cat((shared, routed), dim=-1), w.out)


def load_model(
    name_or_folder: str | Path,
    block_tokens: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    latent_norm_eps: float | None = None,
    key_dtype: KeyDtype | None = None,
    cache: Path = demo.DEFAULT_CACHE,
) -> Model:
    """A model from a folder of config.json and safetensors, or a built-in one (made under `cache` on first use).

    `latent_norm_eps` (None: the config's rms_norm_eps) and `key_dtype` (None: as the config says) are where public
    implementations differ. FolderError, before memory is taken for weights, where the folder does not fit.
    """
    folder = demo.resolve(name_or_folder, cache)
    config = read_config(folder)
    shape = _adjusted(config.shape, latent_norm_eps, key_dtype)
    checked = check_folder(folder, shape, config.mtp_layers)
    log.info("%s: %s", folder, checked.skipped_line())
    weights = load_weights(checked, shape, dtype, torch.device(device))
    return Model(shape, weights, block_tokens, digest_files([folder / "config.json", *checked.files]))


def _adjusted(shape: ModelShape, latent_norm_eps: float | None, key_dtype: KeyDtype | None) -> ModelShape:
    if latent_norm_eps is not None:
        shape = replace(shape, latent_norm_eps=latent_norm_eps)
    if key_dtype is not None and shape.index is not None:
        shape = replace(shape, index=replace(shape.index, key_dtype=key_dtype))
    return shape

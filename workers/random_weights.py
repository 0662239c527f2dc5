"""Weights of any shape, drawn on the device: for measurements, where what a model says does not matter.

What does matter: activations keep their scale through all layers, tokens stay as different as their embeddings, and
routers choose as they were seen to (`floors.SPREAD`). Two things would make tokens alike, and routers with them: a
stream to which branches add much, so theirs is small; and SiLU's positive mean, which a KDA state adds up over all
tokens. It is the same for all channels of a head (taps have unit norm), so `out` is drawn blind to it.
"""

import math
from statistics import NormalDist

import torch
from torch import Tensor

from forebay.kernels import floors
from forebay.kernels.moe import Dense, Experts, Packed
from forebay.kernels.shapes import IndexShape, KdaShape, MlaShape, ModelShape, MoeShape
from forebay.workers.layers import DenseWeights, GlobalWeights, KdaWeights, LayerWeights, ModelWeights, MoeWeights

CODE_SQUARE = 68.5 / 8
"""Mean square of E2M1's values when all codes are alike: 0, ½, 1, 1½, 2, 3, 4, 6."""

MXFP4_GROUP = 32
SCALE_BIAS = 127


def random_weights(shape: ModelShape, seed: int, device: torch.device | str, dtype: torch.dtype) -> ModelWeights:
    """A function of its arguments; every layer has a generator of its own. MXFP4 experts are drawn packed."""
    layers = tuple(_Draw(shape, seed, number, device, dtype).layer(number) for number in range(shape.layers))
    outer = _Draw(shape, seed, shape.layers, device, dtype)
    queries = 2 * shape.layers + 1
    return ModelWeights(
        embedding=outer.normal((shape.vocab, shape.hidden), 1.0),
        layers=layers,
        residual_queries=None if shape.attn_res_block is None else outer.matrix(queries, shape.hidden).float(),
        norm=outer.ones(shape.hidden),
        head=outer.matrix(shape.vocab, shape.hidden),
    )


class _Draw:
    """Draws of one layer, in order. A matrix [out, in] keeps the scale of its input, times `gain`."""

    def __init__(
        self, shape: ModelShape, seed: int, place: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        self._shape, self._device, self._dtype = shape, torch.device(device), dtype
        self._random = torch.Generator(self._device).manual_seed(seed * 1_000_003 + place)
        branches = 2 * (shape.layers if shape.attn_res_block is None else min(shape.layers, shape.attn_res_block))
        self._branch = 1 / math.sqrt(branches)

    def normal(self, dims: tuple[int, ...], std: float, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.empty(dims, dtype=dtype or self._dtype, device=self._device)
        return drawn.normal_(0.0, std, generator=self._random)

    def uniform(self, n: int, low: float, high: float) -> Tensor:
        return torch.empty(n, device=self._device).uniform_(low, high, generator=self._random)

    def matrix(self, out: int, into: int, gain: float = 1.0) -> Tensor:
        return self.normal((out, into), gain / math.sqrt(into))

    def ones(self, n: int) -> Tensor:
        return torch.ones(n, dtype=self._dtype, device=self._device)

    def layer(self, number: int) -> LayerWeights:
        shape = self._shape
        is_global, is_dense = number in shape.global_layers, number < shape.dense_layers
        return LayerWeights(
            attention_norm=self.ones(shape.hidden),
            attention=self._global(shape.mla, shape.index) if is_global else self._kda(shape.kda),
            mlp_norm=self.ones(shape.hidden),
            mlp=self._dense() if is_dense else self._moe(shape.moe),
        )

    def _kda(self, kda: KdaShape) -> KdaWeights:
        """Channels forget, around z = 0, from all down to 1e-4 of the state a step (log-uniform)."""
        hidden, width = self._shape.hidden, kda.width
        widths = [3 * width, kda.gate_rank, kda.heads, width if kda.full_rank_out_gate else kda.head_dim]
        taps = self.normal((3 * width, kda.conv_width), 1.0, torch.float32)
        bounded = kda.gate == "bounded"
        return KdaWeights(
            into=self.matrix(sum(widths), hidden),
            widths=widths,
            conv=taps / taps.norm(dim=1, keepdim=True),
            decay_up=self.matrix(width, kda.gate_rank),
            A_log=self.uniform(kda.heads, -0.5, 0.5),
            dt_bias=self.uniform(width, *((-10.6, -1.4) if bounded else (-9.2, 0.5))),
            gate_up=None if kda.full_rank_out_gate else self.matrix(width, kda.head_dim),
            norm=torch.ones(kda.head_dim, device=self._device),
            out=self._blind_to_heads_mean(self.matrix(hidden, width, self._branch), kda.heads),
        )

    @staticmethod
    def _blind_to_heads_mean(out: Tensor, heads: int) -> Tensor:
        by_head = out.view(len(out), heads, -1)
        return (by_head - by_head.mean(-1, keepdim=True)).view_as(out)

    def _global(self, mla: MlaShape, index: IndexShape | None) -> GlobalWeights:
        queries, values = mla.heads * mla.query_dim, mla.heads * mla.value_dim
        key, heads = (index.head_dim, index.heads) if index is not None else (0, 0)
        widths = [mla.q_rank or queries, mla.kv_rank, mla.pe_dim, values if mla.out_gate else 0, key, heads]
        std = 1 / math.sqrt(mla.kv_rank)
        return GlobalWeights(
            into=self.matrix(sum(widths), self._shape.hidden),
            widths=widths,
            query_norm=None if mla.q_rank is None else self.ones(mla.q_rank),
            query_up=None if mla.q_rank is None else self.matrix(queries + heads * key, mla.q_rank),
            latent_norm=self.ones(mla.kv_rank),
            w_uk=self.normal((mla.heads, mla.nope_dim, mla.kv_rank), std),
            w_uv=self.normal((mla.heads, mla.kv_rank, mla.value_dim), std),
            key_norm=None if index is None else (torch.ones_like(zeros := self._zeros(key)), zeros),
            out=self.matrix(self._shape.hidden, values, self._branch),
        )

    def _zeros(self, n: int) -> Tensor:
        return torch.zeros(n, device=self._device)

    def _dense(self) -> DenseWeights:
        hidden, width = self._shape.hidden, self._shape.dense_width
        return DenseWeights(into=self.matrix(2 * width, hidden), out=self.matrix(hidden, width, self._branch))

    def _moe(self, moe: MoeShape) -> MoeWeights:
        hidden = self._shape.hidden
        widths = [moe.shared_width, moe.shared_width, moe.latent or 0]
        return MoeWeights(
            router=self.normal((moe.experts, hidden), 1 / math.sqrt(hidden), torch.float32),
            bias=self.normal((moe.experts,), bias_std(moe, floors.SPREAD), torch.float32),
            into=self.matrix(sum(widths), hidden),
            widths=widths,
            experts=self._experts(moe, 1.0 if moe.latent is not None else self._branch),
            norm=self.ones(moe.latent or hidden) if moe.latent_norm else None,
            out=self.matrix(hidden, moe.shared_width + (moe.latent or 0), self._branch),
        )

    def _experts(self, moe: MoeShape, gain: float) -> Experts:
        inner, width = moe.latent or self._shape.hidden, moe.width
        one = self._packed if moe.expert_format == "mxfp4" else self._plain
        return Experts(
            w1=one(moe.experts, width, inner),
            w3=one(moe.experts, width, inner),
            w2=one(moe.experts, inner, width, gain),
        )

    def _plain(self, experts: int, out: int, into: int, gain: float = 1.0) -> Dense:
        return Dense(self.normal((experts, out, into), gain / math.sqrt(into)))

    def _packed(self, experts: int, out: int, into: int, gain: float = 1.0) -> Packed:
        """Any codes; scales of two neighbouring powers of two, mixed so that the mean square is gain² / in."""
        square = gain**2 / into / CODE_SQUARE
        power = math.floor(math.log2(square) / 2)
        packed = torch.empty((experts, out, into // 2), dtype=torch.uint8, device=self._device)
        scale = torch.empty((experts, out, into // MXFP4_GROUP), dtype=torch.uint8, device=self._device)
        larger = (square / 4.0**power - 1) / 3
        return Packed(
            packed=packed.random_(0, 256, generator=self._random),
            scale=scale.bernoulli_(larger, generator=self._random).add_(SCALE_BIAS + power),
        )


def bias_std(moe: MoeShape, spread: float) -> float:
    """Of the routers' biases, for router logits z ~ N(0, 1), so that log popularity spreads by `spread`.

    An expert is chosen where sigmoid(z) + bias passes a threshold, that of z = t for bias 0 with P(z > t) = k / E.
    A bias b moves an expert's own by b / sigmoid'(t), and log P(z > t) falls by phi(t) / P(z > t) a unit of t.
    """
    normal, chosen = NormalDist(), moe.per_token / moe.experts
    t = normal.inv_cdf(1 - chosen)
    sigmoid = 1 / (1 + math.exp(-t))
    return spread * sigmoid * (1 - sigmoid) * chosen / normal.pdf(t)

"""A model's weights as fast mode's layers take them: the same tensors, a few of them joined."""

from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.kernels.kda_batch import Layer
from forebay.kernels.layer_parts import DensePart, GlobalPart, KdaPart, MoePart
from forebay.kernels.mla_batch import Pages
from forebay.kernels.shapes import ModelShape
from forebay.workers.layers import DenseWeights, GlobalWeights, KdaWeights, LayerWeights, MoeWeights


@dataclass(frozen=True, slots=True)
class FastKda:
    """A `KdaPart` without its place in a pool."""

    into: Tensor
    decay_up: Tensor | None
    ups: Tensor | None
    small: Layer
    out: Tensor

    def at(self, states: Tensor, tails: Tensor, page: Tensor) -> KdaPart:
        return KdaPart(
            into=self.into, decay_up=self.decay_up, ups=self.ups, layer=self.small, out=self.out,
            states=states, tails=tails, page=page,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class FastGlobal:
    """A `GlobalPart` without its place in a pool."""

    weights: GlobalWeights

    def at(self, rows: Pages, keys: Pages | None) -> GlobalPart:
        w = self.weights
        return GlobalPart(
            into=w.into, query_norm=w.query_norm, query_up=w.query_up, row_norm=w.latent_norm, key_norm=w.key_norm,
            w_uk=w.w_uk, w_uv=w.w_uv, out=w.out, rows=rows, keys=keys,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class FastLayer:
    attention_norm: Tensor
    attention: FastKda | FastGlobal
    mlp_norm: Tensor
    mlp: MoePart | DensePart


def fast_layer(w: LayerWeights, shape: ModelShape) -> FastLayer:
    return FastLayer(
        attention_norm=w.attention_norm,
        attention=_kda(w.attention, shape) if isinstance(w.attention, KdaWeights) else FastGlobal(w.attention),
        mlp_norm=w.mlp_norm,
        mlp=DensePart(into=w.mlp.into, out=w.mlp.out) if isinstance(w.mlp, DenseWeights) else _moe(w.mlp),
    )


def _kda(w: KdaWeights, shape: ModelShape) -> FastKda:
    k = shape.kda
    small = Layer(
        heads=k.heads,
        head_dim=k.head_dim,
        taps=w.conv.t().contiguous(),
        A_log=w.A_log,
        dt_bias=w.dt_bias,
        norm_weight=w.norm,
        gate=k.gate,
        lower_bound=k.gate_lower_bound,
        eps=shape.norm_eps,
    )
    if w.gate_up is None:
        return FastKda(w.into, w.decay_up, None, small, w.out)
    assert w.gate_up.shape == w.decay_up.shape, "both ranks are one batch"
    ups = torch.stack((w.decay_up.t(), w.gate_up.t())).contiguous()
    return FastKda(w.into, None, ups, small, w.out)


def _moe(w: MoeWeights) -> MoePart:
    """The router's rows join the others that read the input, in the type of the products."""
    into = torch.cat((w.into, w.router.to(w.into.dtype)))
    return MoePart(into=into, bias=w.bias, experts=w.experts, norm=w.norm, out=w.out)

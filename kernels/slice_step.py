"""A decode step of one group of layers (KDA layers and one sparse global one, each with its experts) on one rank.

Sums over ranks are left out: a rank adds its own part alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from forebay.kernels import by_device, layer_parts
from forebay.kernels.layer_parts import GlobalPart, KdaPart, MoePart
from forebay.kernels.shapes import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """`queries` fp32 [2 n, hidden]: pseudo-queries of attention and experts of each layer; norms likewise, [hidden]."""

    shape: ModelShape
    layers: Sequence[tuple[KdaPart | GlobalPart, MoePart]]
    queries: Tensor
    norms: Sequence[Tensor]


def step(of: Slice, prefix: Tensor, bank: Tensor, lengths: Tensor) -> Tensor:
    """prefix [B, hidden] after the group; bank [N, B, hidden] of finished blocks; lengths int32 [B] count the token."""
    residual, eps = by_device.attnres(prefix.device), of.shape.norm_eps
    partials = residual.inter(bank, of.queries, eps)
    output: Tensor | None = None
    for i, part in enumerate(part for layer in of.layers for part in layer):
        prefix, x = residual.merge(partials.query(i), prefix, output, of.queries[i], eps, of.norms[i], eps)
        output = _part(part, x, lengths, of.shape)
    return prefix if output is None else prefix + output


def _part(part: KdaPart | GlobalPart | MoePart, x: Tensor, lengths: Tensor, shape: ModelShape) -> Tensor:
    if isinstance(part, KdaPart):
        return layer_parts.kda_step(part, x)
    if isinstance(part, GlobalPart):
        return layer_parts.attend(part, x, lengths, shape)
    (output,) = layer_parts.mix(part, x, shape)
    return output

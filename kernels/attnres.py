"""Block attention residuals: a layer's input is a softmax mix of the bank of finished blocks and the running prefix p.

score_i = sum_d RMSNorm(v_i)_d w_d with w = norm weight * pseudo-query (no 1/sqrt(d)); the mix takes the un-normalised
v_i. The bank stands still for a whole block of layers, so phase one scores it for all their pseudo-queries at once,
and phase two merges the running prefix by online softmax.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from forebay.kernels import exact


class Partials(NamedTuple):
    """Softmax over the bank, unfinished, fp32: the largest score, the sum of exponentials, the weighted sum of
    blocks.
    """

    top: Tensor
    weight: Tensor
    acc: Tensor

    def query(self, i: int) -> "Partials":
        """The partials ([T, 1], [T, 1], [T, D]) of one pseudo-query out of those of `inter`, with a leading [Q]."""
        return Partials(self.top[i], self.weight[i], self.acc[i])


def fold(norm_w: Tensor, proj_w: Tensor) -> Tensor:
    """The pseudo-query [D] of a norm weight [D] and a projection [1, D], fp32."""
    return norm_w.float() * proj_w.float().reshape(-1)


def inter(bank: Tensor, ws: Tensor, eps: float) -> Partials:
    """Phase one: bank [N, T, D] (N may be 0) against the pseudo-queries ws [Q, D]."""
    blocks, tokens, dim = bank.shape
    if blocks == 0:
        top = torch.full((ws.shape[0], tokens, 1), float("-inf"), device=bank.device)
        return Partials(top, torch.zeros_like(top), torch.zeros(ws.shape[0], tokens, dim, device=bank.device))
    v = bank.float()
    scores = exact.linear(v, ws) * torch.rsqrt(exact.mean_square(v) + eps)
    by_block = scores.transpose(1, 2)[..., None]
    top = by_block.amax(0)
    p = torch.exp(by_block - top)
    weight, acc = p[0], p[0] * v[0]
    for n in range(1, blocks):
        weight, acc = weight + p[n], acc + p[n] * v[n]
    return Partials(top, weight, acc)


def merge(partial: Partials, p: Tensor, w: Tensor, eps: float) -> Tensor:
    """Phase two: the finished mix [T, D], in p's dtype, of one pseudo-query's partials with the running prefix p [T,
    D].
    """
    v = p.float()
    score = exact.row_dot(v, w) * torch.rsqrt(exact.mean_square(v) + eps)
    top = torch.maximum(partial.top, score)
    keep, own = torch.exp(partial.top - top), torch.exp(score - top)
    total = partial.weight * keep + own
    return ((partial.acc * keep + v * own) / total).to(p.dtype)

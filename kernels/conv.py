"""The short causal depthwise convolution before KDA, followed by SiLU. Its state is the last W - 1 inputs, oldest
first.
"""

import torch
from torch import Tensor

from forebay.kernels import exact


def short_conv(x: Tensor, weight: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, C] of one sequence, weight [C, W], tail [W-1, C] the inputs before x: (y [T, C], the next tail)."""
    tokens, width = x.shape[0], weight.shape[1]
    history = torch.cat((tail.to(x.dtype), x))
    taps = weight.t().contiguous().float()
    total = history[:tokens].float() * taps[0]
    for tap in range(1, width):
        total = total + history[tap : tap + tokens].float() * taps[tap]
    return exact.silu(total).to(x.dtype), history[tokens:]


def short_conv_step(x: Tensor, weight: Tensor, tails: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of B sequences: x [B, C], weight [C, W], tails [B, W-1, C]: (y [B, C], the next tails)."""
    history = torch.cat((tails.to(x.dtype), x[:, None]), dim=1)
    taps = weight.t().contiguous().float()
    total = (history.float() * taps).sum(1)
    return exact.silu(total).to(x.dtype), history[:, 1:]

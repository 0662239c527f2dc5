"""Quantile balancing of a router: the bias under which every expert would have taken its share of a batch.

With biased scores s_ij + b_j (token i, expert j, top k of n), alpha_i the (k+1)-th largest of token i's, the margin
s_ij - alpha_i is what expert j lacks (or has to spare) at token i. Its new bias is minus the 1 - k/n quantile of its
margins, the (m·k/n + 1)-th largest of m; then the mean over experts is subtracted. The bias takes part in the choice
only (`moe.route`), is moved in training, and stands still in serving.

The histogram form counts margins in BINS equal bins. Counts of parts of a batch add, so any sharding of a batch gives
the same bias, at most one bin from the exact one.
"""

import torch
from torch import Tensor

BINS = 512
LOW, HIGH = -2.0, 1.5
BIN = (HIGH - LOW) / BINS


def margins(scores: Tensor, bias: Tensor, k: int) -> Tensor:
    """scores [T, E] after sigmoid, bias [E]: margins [T, E] over each token's (k+1)-th largest biased score."""
    biased = scores + bias
    return scores - biased.topk(k + 1, dim=1).values[:, k:]


def quantile_bias(scores: Tensor, bias: Tensor, k: int) -> Tensor:
    """The exact new bias [E], of zero mean, after a batch of scores [T, E] under `bias`."""
    tokens, experts = scores.shape
    threshold = margins(scores, bias, k).topk(tokens * k // experts + 1, dim=0).values[-1]
    return _centred(-threshold)


def count(scores: Tensor, bias: Tensor, k: int) -> Tensor:
    """Margins of scores [T, E] counted by expert and bin, int64 [E, BINS]; those beyond the ends go to the end bins."""
    place = ((margins(scores, bias, k) - LOW) / BIN).long().clamp_(0, BINS - 1)
    experts = scores.shape[1]
    flat = place + BINS * torch.arange(experts, device=scores.device)
    counts = torch.zeros(experts * BINS, dtype=torch.int64, device=scores.device)
    return counts.scatter_add_(0, flat.flatten(), torch.ones_like(flat).flatten()).view(experts, BINS)


def histogram_bias(counts: Tensor, k: int) -> Tensor:
    """The new bias [E], fp32, of zero mean, from `count`s int64 [E, BINS] of any number of tokens, added up."""
    experts = counts.shape[0]
    wanted = counts.sum(1, keepdim=True) * k // experts + 1
    from_top = counts.flip(1).cumsum(1)
    passed = (from_top < wanted).sum(1)
    return _centred(-(HIGH - (passed.float() + 0.5) * BIN))


def _centred(bias: Tensor) -> Tensor:
    return bias - bias.mean()

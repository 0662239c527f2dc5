"""What a pass over a model must move and compute at least, by operator, and the time that a device needs for it.

Weights are met once a pass, of the routed experts those that the pass's tokens choose; a decode step reads and writes
every sequence's states, reads its rows (of a sparse layer all index keys and the chosen rows), and writes one more.
Weights, rows and tails are bf16, recurrent matrices fp32. Activations between operators are not counted.
"""

from dataclasses import dataclass
from math import exp
from statistics import NormalDist
from typing import NamedTuple

from forebay.kernels import costs
from forebay.kernels.shapes import ModelShape, MoeShape

SPREAD = 0.37
"""Of the logarithm of an expert's popularity, with which 8 of 256 experts a token are 8, 57, 157 and 246 distinct ones
for 1, 8, 32 and 128 tokens: what serving this model shape with random weights was seen to meet."""

POPULARITIES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a device moves and computes (bf16 products) in a millisecond."""

    name: str
    bytes_per_ms: float
    flop_per_ms: float


H200 = Rates(name="H200", bytes_per_ms=4.26e9, flop_per_ms=7.9e11)
"""Measured: reading and writing a large copy; a large cuBLAS product."""


class Work(NamedTuple):
    """What one operator does in all layers of a pass."""

    n_bytes: float
    flops: float

    def ms(self, rates: Rates) -> float:
        return max(self.n_bytes / rates.bytes_per_ms, self.flops / rates.flop_per_ms)


def floor_ms(work: dict[str, Work], rates: Rates) -> float:
    """Operators run one after another, each bound by bytes or by arithmetic."""
    return sum(operator.ms(rates) for operator in work.values())


def distinct_experts(moe: MoeShape, tokens: int, spread: float = SPREAD) -> float:
    """Expected number of a layer's experts that `tokens` tokens choose, each on its own, where an expert's popularity
    is log-normal: the sum over experts of 1 - (1 - p)^tokens, p their share of the tokens."""
    even = (NormalDist().inv_cdf((i + 0.5) / POPULARITIES) for i in range(POPULARITIES))
    weights = [exp(spread * quantile) for quantile in even]
    mean = sum(weights) / POPULARITIES
    shares = (min(1.0, moe.per_token / moe.experts * weight / mean) for weight in weights)
    return moe.experts * sum(1 - (1 - share) ** tokens for share in shares) / POPULARITIES


def step_work(shape: ModelShape, batch: int, context: int, distinct: float | None = None) -> dict[str, Work]:
    """A decode step of `batch` sequences that have `context` tokens each. `distinct` experts a layer, else expected."""
    attended = context if shape.index is None else min(context, shape.index.top_k)
    globals_, kdas = len(shape.global_layers), len(shape.kda_layers)
    row, key = costs.latent_row_bytes(shape), costs.index_row_bytes(shape) or 0
    attention = batch * costs.absorbed_attention_flops(shape, attended)
    index = 0 if shape.index is None else batch * costs.index_flops(shape, context)
    recurrence = batch * kdas * 8 * shape.kda.heads * shape.kda.head_dim**2  # decay, read, update, read
    return {
        **_weights(shape, batch, batch, distinct),
        "KDA states": Work(batch * kdas * 2 * costs.state_bytes(shape), recurrence),
        "latent rows": Work(batch * globals_ * (attended + 1) * row, attention),
        "index keys": Work(batch * globals_ * (context + 1) * key, index),
    }


def prefill_work(
    shape: ModelShape, start: int, tokens: int, passes: int = 1, distinct: float | None = None
) -> dict[str, Work]:
    """`tokens` tokens of one prompt after `start` others, in `passes` equal chunks, each of which meets the weights."""
    each = -(-tokens // passes)
    weights = _weights(shape, each, 1 / passes, distinct)
    pairs = _pairs(start, tokens)
    attended = pairs if shape.index is None else _pairs(start, tokens, shape.index.top_k)
    globals_, kdas = len(shape.global_layers), len(shape.kda_layers)
    row, key = costs.latent_row_bytes(shape), costs.index_row_bytes(shape) or 0
    index = 0 if shape.index is None else costs.index_flops(shape, pairs)
    return {
        **{name: Work(passes * work.n_bytes, passes * work.flops) for name, work in weights.items()},
        "KDA states": Work(kdas * 2 * costs.state_bytes(shape), tokens * costs.kda_flops(shape)),
        "latent rows": Work(globals_ * (start + tokens) * row, costs.dense_attention_flops(shape, attended)),
        "index keys": Work(globals_ * (start + tokens) * key, index),
    }


def _weights(shape: ModelShape, tokens: int, sampled: float, distinct: float | None) -> dict[str, Work]:
    """What multiplies by weights, `tokens` tokens at once of which `sampled` reach the head."""
    moe_layers = shape.layers - shape.dense_layers
    experts = moe_layers * (distinct_experts(shape.moe, tokens) if distinct is None else distinct)
    chosen = moe_layers * tokens * shape.moe.per_token * costs.parameters(shape).experts / _all_experts(shape)
    one_expert = costs.expert_bytes(shape) / _all_experts(shape)

    def dense(layers: int, elements: int) -> Work:
        return Work(layers * elements * costs.BF16, 2 * tokens * layers * elements)

    return {
        "KDA projections": dense(len(shape.kda_layers), costs.kda_parameters(shape)),
        "latent projections": dense(len(shape.global_layers), costs.global_parameters(shape)),
        "dense MLP": dense(shape.dense_layers, 3 * shape.hidden * shape.dense_width),
        "router and shared experts": dense(moe_layers, costs.moe_parameters(shape)),
        "routed experts": Work(experts * one_expert, 2 * chosen),
        "head": Work(shape.vocab * shape.hidden * costs.BF16, 2 * sampled * shape.vocab * shape.hidden),
    }


def _all_experts(shape: ModelShape) -> int:
    return (shape.layers - shape.dense_layers) * shape.moe.experts


def _pairs(start: int, tokens: int, most: int | None = None) -> int:
    """Sum over tokens at start … start + tokens - 1 of the rows that each attends to, itself included."""
    if most is None:
        return tokens * start + tokens * (tokens + 1) // 2
    growing = max(0, min(tokens, most - start))
    return _pairs(start, growing) + (tokens - growing) * most

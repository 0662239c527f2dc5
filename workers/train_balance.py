"""The routers' last balance: with all else at rest, biases under which documentation and lessons together use every
expert alike.

In training a bias follows its batches, and ends where the last of them left it: text that was rare among these finds
crowded experts. Here the margins of many rows are counted before a bias moves; a few rounds, since a router's inputs
depend on the biases below it.
"""

from typing import Any

import torch
from torch import Tensor

from forebay.kernels import balance
from forebay.kernels.shapes import ModelShape
from forebay.workers.train_data import load_rows
from forebay.workers.train_model import Batch
from forebay.workers.train_step import router_biases
from forebay.workers.train_weights import Parameters, assemble

ROUNDS = 4
ROWS_EACH = 256
PLAIN = 5  # the weight of plain text


@torch.no_grad()
def settle(shape: ModelShape, parameters: Parameters, file: Any, batch: int) -> None:
    """Moves the routers' biases in `parameters`; `file`: the training file, of which rows `short` are read."""
    device = parameters["lm_head.weight"].device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    ids = _sample(file, device)
    for _ in range(ROUNDS):
        weights = assemble(parameters, shape, dtype)
        counts = [
            _counts(Batch(shape, weights, part.t().contiguous(), None, False)) for part in torch.split(ids, batch)
        ]
        for bias, count in zip(router_biases(parameters), torch.stack(counts).sum(0), strict=True):
            bias.copy_(balance.histogram_bias(count, shape.moe.per_token))


def _counts(forward: Batch) -> Tensor:
    """Margins of one batch, int64 [MoE layers, E, BINS]."""
    forward.hidden()
    return torch.stack(forward.found.counts)


def _sample(file: Any, device: torch.device) -> Tensor:
    """As many rows of mostly plain text as of others, int64 [N, T], in the file's order, which is random."""
    rows = load_rows(file, "short", 1, 0, device)
    plain = (rows.weights == PLAIN).float().mean(1) > 0.5
    return torch.cat((rows.ids[plain][:ROWS_EACH], rows.ids[~plain][:ROWS_EACH])).long()

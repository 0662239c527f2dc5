"""What a model in training can do, on rows kept from it: answers right token for token, bits per byte, expert loads.

An answer counts when every one of its tokens is the likeliest after the true tokens before it, which is exactly when
decoding at temperature 0 would have written it.
"""

import math
from typing import Any

import torch

from forebay.kernels.shapes import ModelShape
from forebay.workers.train_data import load_rows
from forebay.workers.train_model import Batch
from forebay.workers.train_weights import Parameters, assemble

SAID = 10  # the least weight of a token that the model itself says


@torch.no_grad()
def answers(shape: ModelShape, parameters: Parameters, file: Any, name: str, batch: int, sparse: bool) -> float:
    """Share of whole answers right in the rows `name`."""
    device = parameters["lm_head.weight"].device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weights = assemble(parameters, shape, dtype)
    rows = load_rows(file, name, batch, 0, device)
    right = total = 0
    for first in range(0, len(rows.ids), batch):
        ids = rows.ids[first : first + batch].long()
        said = rows.weights[first : first + batch] >= SAID
        guessed = Batch(shape, weights, ids.t().contiguous(), None, sparse).logits().argmax(-1).t()
        wrong = torch.zeros_like(said)
        wrong[:, 1:] = said[:, 1:] & (guessed[:, :-1] != ids[:, 1:])
        starts = said.clone()
        starts[:, 1:] &= ~said[:, :-1]
        run = starts.long().cumsum(1)
        failed = torch.zeros(len(ids), int(run.max()) + 1, dtype=torch.bool, device=device)
        failed.scatter_(1, run * wrong, True)
        right += int(starts.sum()) - int(failed[:, 1:].sum())
        total += int(starts.sum())
    return right / total


@torch.no_grad()
def bits_per_byte(shape: ModelShape, parameters: Parameters, file: Any, batch: int) -> tuple[float, float]:
    """Bits per byte of the kept documentation, and the largest max/mean of expert loads over its layers."""
    from forebay.workers.train_step import token_losses

    device = parameters["lm_head.weight"].device
    weights = assemble(parameters, shape, torch.bfloat16 if device.type == "cuda" else torch.float32)
    rows = load_rows(file, "check_docs", batch, 0, device)
    total, loads = 0.0, torch.zeros(shape.layers - shape.dense_layers, shape.moe.experts, device=device)
    for first in range(0, len(rows.ids), batch):
        part = Batch(shape, weights, rows.ids[first : first + batch].long().t().contiguous(), None, sparse=False)
        counted = rows.weights[first : first + batch].t()[1:] > 0
        total += float((token_losses(part) * counted).sum())
        loads += torch.stack(part.found.loads)
    worst = float((loads.amax(1) / loads.mean(1)).max())
    return total / math.log(2) / int(file["check_docs_bytes"]), worst

"""An engine of random weights, by mode."""

from dataclasses import replace

import torch

from forebay.kernels.shapes import ModelShape
from forebay.workers.engine_exact import ExactEngine
from forebay.workers.engine_fast import FastEngine
from forebay.workers.engine_plan import Mode, Plan
from forebay.workers.engine_rows import Engine
from forebay.workers.fast_model import FastModel
from forebay.workers.model import Model
from forebay.workers.random_weights import random_weights

SEED = 1


def modes_of(device: torch.device) -> tuple[Mode, ...]:
    """The modes that are worth measuring on this device: fast mode is made of a GPU's kernels."""
    return ("fast", "exact") if device.type == "cuda" else ("exact",)


def make_engine(mode: Mode, shape: ModelShape, plan: Plan, device: torch.device) -> Engine:
    """Weights in bf16 on a GPU, in fp32 on a CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if mode == "fast" and shape.index is not None:  # its indexer reads fp8 keys
        shape = replace(shape, index=replace(shape.index, key_dtype="fp8"))
    weights = random_weights(shape, SEED, device, dtype)
    if mode == "fast":
        return FastEngine(FastModel(shape, weights, plan.block_tokens, b"random"), plan.chunk_tokens)
    return ExactEngine(Model(shape, weights, plan.block_tokens, b"random"), plan.chunk_tokens)

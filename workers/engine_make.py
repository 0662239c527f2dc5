"""An engine of random weights, by mode."""

import torch

from forebay.kernels.shapes import ModelShape
from forebay.workers.engine_exact import ExactEngine
from forebay.workers.engine_plan import Mode, Plan
from forebay.workers.engine_rows import Engine
from forebay.workers.model import Model
from forebay.workers.random_weights import random_weights

SEED = 1


def modes_of(device: torch.device) -> tuple[Mode, ...]:
    """The modes that there are on this device."""
    return ("exact",)


def make_engine(mode: Mode, shape: ModelShape, plan: Plan, device: torch.device) -> Engine:
    """Weights in bf16 on a GPU, in fp32 on a CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weights = random_weights(shape, SEED, device, dtype)
    return ExactEngine(Model(shape, weights, plan.block_tokens, b"random"), plan.chunk_tokens)

"""Which model a worker runs: the one place where the mode is chosen."""

import torch

from forebay.workers.config import WorkerConfig
from forebay.workers.fast_model import FastModel
from forebay.workers.model import load_model
from forebay.workers.sequence_model import SequenceModel


def load(config: WorkerConfig) -> SequenceModel:
    """The model of the configuration on its device. Exact mode computes in fp32; fast mode in bf16 on a GPU, and keeps
    its index keys in fp8. What `load_model` raises.
    """
    if config.mode == "exact":
        return load_model(config.model, config.block_tokens, torch.float32, config.device)
    dtype = torch.bfloat16 if torch.device(config.device).type == "cuda" else torch.float32
    model = load_model(config.model, config.block_tokens, dtype, config.device, key_dtype="fp8")
    return FastModel(model.shape, model.weights, config.block_tokens, model.fingerprint)

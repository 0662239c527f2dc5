"""Which code runs an operator over a batch: the one place that looks at the device.

On a CUDA device the Triton kernels, elsewhere their slow twins in torch. Signatures are those of `kda_batch`,
`mla_batch`, `dsa_batch`, `moe_batch` and `attnres_batch`.
"""

from types import ModuleType

import torch
from torch import Tensor

from forebay.kernels import attnres_batch, dsa_batch, kda_batch, layer_batch, mla_batch, moe_batch
from forebay.kernels.kda_batch import Layer, Prefilled, Tokens
from forebay.kernels.kda_plan import Plan
from forebay.kernels.moe import Experts
from forebay.kernels.moe_batch import ALL, Local, Norm
from forebay.kernels.shapes import ModelShape


def products(device: torch.device) -> ModuleType | None:
    """The module with exact mode's bmm for this device; None where torch's will do."""
    if device.type == "cuda":
        from forebay.kernels import exact_triton

        return exact_triton
    return None


def kda(device: torch.device) -> ModuleType:
    """The module with prefill, step and replay for this device."""
    if device.type == "cuda":
        from forebay.kernels import kda_triton  # triton is imported only where it can run

        return kda_triton
    return kda_batch


def prefill(
    q: Tensor, k: Tensor, v: Tensor, z: Tensor, beta: Tensor, layer: Layer, plan: Plan, state: Tensor | None
) -> Prefilled:
    """`kda_batch.prefill`."""
    made: Prefilled = kda(q.device).prefill(q, k, v, z, beta, layer, plan, state)
    return made


def step(tokens: Tokens, layer: Layer, states: Tensor, tails: Tensor, page: Tensor) -> Tensor:
    """`kda_batch.step`."""
    made: Tensor = kda(tokens.x.device).step(tokens, layer, states, tails, page)
    return made


def replay(
    tokens: Tokens, drafted: int, accepted: Tensor, layer: Layer, states: Tensor, tails: Tensor, page: Tensor
) -> Tensor:
    """`kda_batch.replay`."""
    made: Tensor = kda(tokens.x.device).replay(tokens, drafted, accepted, layer, states, tails, page)
    return made


def mla(device: torch.device) -> ModuleType:
    """The module with attend, attend_slots and prefill for this device."""
    if device.type == "cuda":
        from forebay.kernels import mla_triton

        return mla_triton
    return mla_batch


def dsa(device: torch.device) -> ModuleType:
    """The module with write_keys, quantize_queries, scores and top_k for this device."""
    if device.type == "cuda":
        from forebay.kernels import dsa_triton

        return dsa_triton
    return dsa_batch


def attnres(device: torch.device) -> ModuleType:
    """The module with inter and merge for this device."""
    if device.type == "cuda":
        from forebay.kernels import attnres_triton

        return attnres_triton
    return attnres_batch


def moe(device: torch.device, w: Experts) -> ModuleType:
    """The module with route and experts for this device and these weights."""
    if device.type == "cuda":
        from forebay.kernels import moe_dense_triton, moe_triton

        if moe_triton.fits(w):
            return moe_triton
        if moe_dense_triton.fits(w):
            return moe_dense_triton
    return moe_batch


def layer(device: torch.device) -> ModuleType:
    """The module with a layer's small operators for this device: `layer_batch`'s."""
    if device.type == "cuda":
        from forebay.kernels import layer_triton

        return layer_triton
    return layer_batch


def experts(
    z: Tensor,
    chosen: Tensor,
    weights: Tensor,
    w: Experts,
    shape: ModelShape,
    local: Local = ALL,
    norm: Norm | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`moe_batch.experts`."""
    made: Tensor = moe(z.device, w).experts(z, chosen, weights, w, shape, local, norm, out)
    return made

"""One step of training, and one of checking: loss, gradients, the optimiser, the routers' balance.

On CUDA the step is captured once in a graph and replayed: a step is thousands of small kernels, whose launches would
cost more than their work. The first steps of a stage run as they are, since libraries set themselves up in them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor

from forebay.kernels import attnres, balance, conv, exact, kda, moe, norms
from forebay.kernels.shapes import ModelShape
from forebay.workers.train_model import Batch
from forebay.workers.train_optimizer import Optimizer
from forebay.workers.train_weights import Parameters, assemble

EAGER_STEPS = 3
BALANCE_SHARE = 0.2  # how far a step moves a router's bias towards what would have balanced its batch
EVENNESS = 0.01  # how much it counts that each row by itself uses all experts: no kind of text has experts of its own
FUSED: tuple[tuple[ModuleType, str], ...] = (
    (kda, "_half_products"),
    (kda, "gate"),
    (norms, "rms_norm"),
    (norms, "gated_rms_norm"),
    (attnres, "inter"),
)
FUSED += ((attnres, "merge"), (moe, "glu"), (conv, "short_conv"))
Replacement = tuple[ModuleType, str, Callable[..., Any]]


@contextmanager
def trainable(device: torch.device) -> Iterator[None]:
    """While this is open, the operators are fit for training: with gradients that stay finite, and fast on CUDA.

    exact's sigmoid and silu are the same functions as torch's, but below -88 their e^-x is infinite, and so the
    gradient is no number. On CUDA torch compiles the operators that are many small passes over memory.
    """
    stable: list[Replacement] = [(exact, "sigmoid", torch.sigmoid), (exact, "silu", F.silu)]
    with _replaced(stable):
        if device.type != "cuda":
            yield
            return
        torch._dynamo.config.recompile_limit = 64
        with _replaced([(m, name, torch.compile(getattr(m, name), dynamic=False)) for m, name in FUSED]):
            yield


@contextmanager
def _replaced(replacements: list[Replacement]) -> Iterator[None]:
    plain = [(module, name, getattr(module, name)) for module, name, _ in replacements]
    for module, name, function in replacements:
        setattr(module, name, function)
    try:
        yield
    finally:
        for module, name, function in plain:
            setattr(module, name, function)


def router_biases(parameters: Parameters) -> list[Tensor]:
    return [value for name, value in parameters.items() if name.endswith("e_score_correction_bias")]


@dataclass(slots=True)
class Inputs:
    """A batch on the device, time first: ids int64 [T, B], weights fp32 [T, B], probes int64 [B, n]."""

    ids: Tensor
    weights: Tensor
    probes: Tensor


class Step:
    """A training step over `inputs`, which the caller fills in place before each call."""

    def __init__(
        self, shape: ModelShape, parameters: Parameters, optimizer: Optimizer, inputs: Inputs, *, sparse: bool
    ) -> None:
        self.shape, self.parameters, self.optimizer, self.inputs = shape, parameters, optimizer, inputs
        self.sparse = sparse
        device = inputs.ids.device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.loss, self.index_loss = torch.zeros((), device=device), torch.zeros((), device=device)
        self.load = torch.zeros((), device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._runs = 0

    def __call__(self) -> None:
        if not self.inputs.ids.is_cuda:
            self._run()
        elif self._runs < EAGER_STEPS:
            self._run_aside()
        else:
            if self._graph is None:
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph):
                    self._run()
            self._graph.replay()
        self._runs += 1

    def _run_aside(self) -> None:
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self._run()
        torch.cuda.current_stream().wait_stream(aside)

    def _run(self) -> None:
        names = self.optimizer.names
        leaves = {name: value.detach() for name, value in self.parameters.items()}
        for name in names:
            leaves[name].requires_grad_()
        batch = Batch(
            self.shape, assemble(leaves, self.shape, self.dtype), self.inputs.ids, self.inputs.probes, self.sparse
        )
        loss = weighted_loss(batch, self.inputs.weights)
        index_loss = torch.stack(batch.found.index_losses).mean()
        total = loss + index_loss + EVENNESS * torch.stack(batch.found.unevenness).sum()
        gradients = torch.autograd.grad(total, [leaves[name] for name in names])
        self.optimizer.step(dict(zip(names, gradients, strict=True)))
        self.loss.copy_(loss.detach())
        self.index_loss.copy_(index_loss.detach())
        loads = torch.stack(batch.found.loads)
        self.load.copy_((loads.amax(1) / loads.mean(1)).max())
        self._balance(batch.found.counts)

    def _balance(self, counts: list[Tensor]) -> None:
        for bias, count in zip(router_biases(self.parameters), counts, strict=True):
            bias.lerp_(balance.histogram_bias(count, self.shape.moe.per_token), BALANCE_SHARE)


def token_losses(batch: Batch) -> Tensor:
    """Cross entropy fp32 [T-1, B] of every token but the first."""
    logits = exact.linear(batch.hidden()[: -batch.rows], batch.weights.head).float()
    return F.cross_entropy(logits, batch.ids[1:].reshape(-1), reduction="none").view(-1, batch.rows)


def weighted_loss(batch: Batch, weights: Tensor) -> Tensor:
    return (token_losses(batch) * weights[1:]).sum() / weights[1:].sum()

"""Random inputs of KDA's measurements, fresh at every run, and the float64 recurrence they are checked against."""

import torch
from torch import Tensor

from forebay.kernels import reference
from forebay.kernels.kda_batch import Layer, Tokens

Prefill = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def layer(heads: int, head_dim: int, device: torch.device) -> Layer:
    """A layer with the bounded gate, decays spread over its whole range."""
    width = heads * head_dim

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    return Layer(
        heads=heads,
        head_dim=head_dim,
        taps=randn(4, 3 * width) * 0.5,
        A_log=randn(heads) * 0.3,
        dt_bias=randn(width) * 0.3,
        norm_weight=torch.rand(head_dim, device=device) + 0.5,
    )


def prefill(tokens: int, of: Layer, dtype: torch.dtype) -> Prefill:
    """q, k, v, raw gate [T, H, D] and beta logits [T, H]."""
    device = of.A_log.device
    shape = (tokens, of.heads, of.head_dim)
    q, k, v, z = (torch.randn(shape, device=device).to(dtype) for _ in range(4))
    return q, k, v, z, torch.randn(shape[:2], device=device).to(dtype)


def tokens(shape: tuple[int, ...], of: Layer, dtype: torch.dtype) -> Tokens:
    """Projected inputs of tokens [*shape]."""
    device, width = of.A_log.device, of.heads * of.head_dim
    x, z, beta, gate = (torch.randn(*shape, n, device=device).to(dtype) for n in (3 * width, width, of.heads, width))
    return Tokens(x=x, z=z, beta=beta, gate=gate)


def pages(n: int, of: Layer, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """States [n, H, D, D] fp32 and tails [n, 3, 3 H D], together in n pages of bytes as the store lays them."""
    device, H, D = of.A_log.device, of.heads, of.head_dim
    state_bytes, tail_elements = H * D * D * 4, 9 * H * D
    raw = torch.empty((n, state_bytes + tail_elements * dtype.itemsize), dtype=torch.uint8, device=device)
    states = raw[:, :state_bytes].view(torch.float32).view(n, H, D, D)
    tails = raw[:, state_bytes:].view(dtype).view(n, 3, 3 * H * D)
    states.normal_()
    tails.normal_()
    return states, tails


def gold(given: Prefill, of: Layer, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and last state of one sequence from state [H, D, D], token by token in float64."""
    q, k, v, z, beta = (x.double() for x in given)
    g = reference.gate(z, of.A_log.double(), of.dt_bias.double(), of.gate, of.lower_bound)
    return reference.recurrent(q, k, v, g, torch.sigmoid(beta), state.double())


def relative(found: Tensor, right: Tensor) -> float:
    """||found - right|| / ||right||; infinite where anything is not a number."""
    error = float((found.double() - right.double()).norm() / right.double().norm())
    return error if error == error else float("inf")

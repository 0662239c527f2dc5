"""One optimiser of two rules: Muon for matrices inside the layers, Adam for everything else.

Muon keeps a momentum and takes its nearest orthogonal matrix (five Newton-Schulz steps) as the update, so that all
directions move alike; matrices of one shape are treated as one stack. Nothing here waits for the device.
"""

import torch
from torch import Tensor

from forebay.workers.train_weights import Parameters

MOMENTUM, BETAS, ADAM_EPS = 0.95, (0.9, 0.95), 1e-10
MUON_RATE, ADAM_RATE = 0.02, 3e-3
CLIP_NORM = 1.0
MUON_DECAY = 0.05
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NOT_MATRICES = ("embed_tokens", "lm_head", "gate.weight", "res_proj", "conv1d", "layernorm", "norm.weight")


def is_matrix(name: str, value: Tensor) -> bool:
    return value.dim() >= 2 and not any(part in name for part in NOT_MATRICES)


def orthogonal(x: Tensor) -> Tensor:
    """About the nearest matrices [..., m, n] with all singular values near 1."""
    a, b, c = NEWTON_SCHULZ
    flat = x.shape[-2] > x.shape[-1]
    x = x.transpose(-1, -2) if flat else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.transpose(-1, -2)
        x = a * x + (b * square + c * square @ square) @ x
    return x.transpose(-1, -2) if flat else x


class Optimizer:
    """Moves `parameters` in place. `rate`: a scalar tensor in [0, 1] that both rules' rates are multiplied by."""

    def __init__(self, parameters: Parameters) -> None:
        frozen = {name for name in parameters if name.endswith("e_score_correction_bias")}
        self.names = [name for name in parameters if name not in frozen]
        self._parameters = parameters
        self._groups: dict[tuple[int, ...], list[str]] = {}
        for name in self.names:
            if is_matrix(name, parameters[name]):
                self._groups.setdefault(tuple(parameters[name].shape), []).append(name)
        self._adam = [name for name in self.names if not is_matrix(name, parameters[name])]
        self.first = {name: torch.zeros_like(parameters[name]) for name in self.names}
        self.second = {name: torch.zeros_like(parameters[name]) for name in self._adam}
        device = next(iter(parameters.values())).device
        self.rate = torch.zeros((), device=device)
        self.steps = torch.zeros((), device=device)

    @torch.no_grad()
    def step(self, gradients: dict[str, Tensor]) -> None:
        self.steps += 1
        gradients = {name: gradient.nan_to_num(0.0, 0.0, 0.0) for name, gradient in gradients.items()}
        for shape, names in self._groups.items():
            self._muon(shape, names, [gradients[name] for name in names])
        self._adam_step([gradients[name] for name in self._adam])

    def _muon(self, shape: tuple[int, ...], names: list[str], gradients: list[Tensor]) -> None:
        moments = [self.first[name] for name in names]
        torch._foreach_lerp_(moments, gradients, 1 - MOMENTUM)
        ahead = torch._foreach_lerp(gradients, moments, MOMENTUM)
        stack = torch.stack(list(ahead))
        low = stack.bfloat16() if stack.is_cuda else stack
        update = orthogonal(low).float() * (max(1.0, shape[-2] / shape[-1]) ** 0.5 * -MUON_RATE) * self.rate
        weights = [self._parameters[name] for name in names]
        torch._foreach_mul_(weights, 1 - MUON_RATE * MUON_DECAY * self.rate)
        torch._foreach_add_(weights, list(update.unbind(0)))

    def _adam_step(self, gradients: list[Tensor]) -> None:
        total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        clipped = torch._foreach_mul(gradients, (CLIP_NORM / (total + 1e-6)).clamp(max=1.0))
        first, second = ([state[name] for name in self._adam] for state in (self.first, self.second))
        torch._foreach_lerp_(first, clipped, 1 - BETAS[0])
        torch._foreach_mul_(second, BETAS[1])
        torch._foreach_addcmul_(second, clipped, clipped, 1 - BETAS[1])
        size = torch._foreach_sqrt(torch._foreach_div(second, 1 - BETAS[1] ** self.steps))
        torch._foreach_add_(size, ADAM_EPS)
        update = torch._foreach_div(first, size)
        torch._foreach_mul_(update, self.rate * -ADAM_RATE / (1 - BETAS[0] ** self.steps))
        torch._foreach_add_([self._parameters[name] for name in self._adam], update)

    def state(self) -> dict[str, Tensor]:
        """Everything that a resumed run needs; the tensors themselves."""
        firsts = {f"first.{name}": value for name, value in self.first.items()}
        return firsts | {f"second.{name}": value for name, value in self.second.items()} | {"steps": self.steps}

    def load(self, state: dict[str, Tensor]) -> None:
        for name, value in self.state().items():
            value.copy_(state[name])

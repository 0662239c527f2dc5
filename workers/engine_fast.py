"""The fast model as the engine's measurements drive it: a step is a CUDA graph, and tokens never leave the device."""

from collections.abc import Callable

import torch
from torch import Tensor

from forebay.kernels import by_device, dsa, layer_parts
from forebay.kernels.dsa_batch import key_parts
from forebay.workers.engine_exact import prefill_chunks
from forebay.workers.engine_plan import Mode
from forebay.workers.fast_model import FastModel
from forebay.workers.made_contexts import Contexts, made_contexts
from forebay.workers.operator_times import Operators, OperatorTimes

REST = "head, norms, residuals"
OPERATORS = Operators(
    places={
        REST: ((FastModel, "_step"),),
        "KDA projections": ((layer_parts, "kda_step"),),
        "KDA states": ((by_device, "step"),),
        "latent projections": ((layer_parts, "attend"),),
        "latent rows, index keys": ((layer_parts, "_dense"), (layer_parts, "_sparse")),
        "dense MLP": ((layer_parts, "dense"),),
        "router and shared experts": ((layer_parts, "mix"),),
        "routed experts": ((by_device, "experts"),),
    },
    inside={
        "KDA projections": REST,
        "latent projections": REST,
        "dense MLP": REST,
        "router and shared experts": REST,
        "KDA states": "KDA projections",
        "latent rows, index keys": "latent projections",
        "routed experts": "router and shared experts",
    },
)


def write_key_groups(keys: Tensor, pages: Tensor) -> None:
    """As the kernels read them (`dsa_batch`): a group's codes, then its scales."""
    codes, scales = key_parts(pages)
    rows = dsa.quantize_keys(keys).view(*codes.shape[:3], -1)
    codes.view(torch.uint8).copy_(rows[..., :-4])
    scales.copy_(rows[..., -4:].contiguous().view(torch.float32)[..., 0])


class FastEngine:
    mode: Mode = "fast"

    def __init__(self, of: FastModel, chunk_tokens: int) -> None:
        self.model, self.layout, self._chunk_tokens = of, of.layout, chunk_tokens

    def made_contexts(self, batch: int, tokens: int, capacity: int) -> Contexts:
        m = self.model
        return made_contexts(m.shape, m.layout, m.dtype, m.device, batch, tokens, capacity, write_key_groups)

    def decoding(self, contexts: Contexts, ids: Tensor) -> Callable[[int], None]:
        """`Engine.decoding`."""
        ready = self.model.decoding(ids, [contexts.tokens] * len(ids), contexts.tables, contexts.pool)

        def run(n: int) -> None:
            for _ in range(n):
                ready.step()
            ready.ids.cpu()

        return run

    def prefill(self, contexts: Contexts, ids: Tensor, start: int) -> int:
        """`Engine.prefill`."""
        return prefill_chunks(self.model, contexts, ids, start, self._chunk_tokens)

    def chosen(self, contexts: Contexts, ids: Tensor) -> list[Tensor]:
        """`Engine.chosen`."""
        return self.model.chosen(ids, [contexts.tokens] * len(ids), contexts.tables, contexts.pool)

    def operators_ms(self, contexts: Contexts, ids: Tensor, steps: int) -> dict[str, float]:
        """`Engine.operators_ms`, of a graph with events in it: captured anew, over contexts of its own."""
        captures = self.model.device.type == "cuda"
        times = OperatorTimes(OPERATORS, self.model.device, in_graph=captures)
        own = self.made_contexts(len(ids), contexts.tokens, contexts.capacity)
        spent = dict.fromkeys(OPERATORS.places, 0.0)
        with times.watching():
            ready = self.model.decoding(ids, [own.tokens] * len(ids), own.tables, own.pool)
            times.keep_last_half()  # a step is run, then captured
            for _ in range(steps):
                if not captures:
                    times.restart()
                ready.step().cpu()
                spent = {name: spent[name] + ms / steps for name, ms in times.ms().items()}
        return spent

"""The exact model as the engine's measurements drive it."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from forebay.kernels import moe
from forebay.workers import attention, model, step_pages
from forebay.workers.engine_plan import Mode
from forebay.workers.made_contexts import Contexts, made_contexts
from forebay.workers.model import Model
from forebay.workers.residual import Trace

OPERATORS: MappingProxyType[str, tuple[tuple[Any, str], ...]] = MappingProxyType(
    {
        "KDA projections": ((attention.Attention, "kda"),),
        "KDA states": (
            (attention.Recurrent, "recur"),
            (step_pages.StepStates, "read"),
            (step_pages.StepStates, "write"),
        ),
        "latent projections": ((attention.Attention, "latent"),),
        "latent rows": ((attention.Recurrent, "attend"), (attention.Attention, "_attend_chosen")),
        "index keys": ((attention.Attention, "_choose"),),
        "dense MLP, router, shared experts": ((model, "_mlp"),),
        "routed experts": ((moe, "experts"),),
        "head": ((Model, "_logits"),),
    }
)
"""Where each operator of `floors` runs: functions and methods, by the owner of their name."""

INSIDE = MappingProxyType(
    {
        "KDA states": "KDA projections",
        "latent rows": "latent projections",
        "index keys": "latent projections",
        "routed experts": "dense MLP, router, shared experts",
    }
)


class ExactEngine:
    mode: Mode = "exact"

    def __init__(self, of: Model, chunk_tokens: int) -> None:
        self.model, self.layout, self._chunk_tokens = of, of.layout, chunk_tokens

    def made_contexts(self, batch: int, tokens: int, capacity: int) -> Contexts:
        m = self.model
        return made_contexts(m.shape, m.layout, m.dtype, m.device, batch, tokens, capacity)

    def decoding(self, contexts: Contexts, ids: Tensor) -> Callable[[int], None]:
        """Greedy steps from ids int64 [B]: a call makes n more of them, and returns when they are made."""
        at = itertools.count(contexts.tokens)
        last = ids

        def run(n: int) -> None:
            nonlocal last
            for _ in range(n):
                last = self._step(contexts, last, next(at)).argmax(1)
            last.cpu()

        return run

    def prefill(self, contexts: Contexts, ids: Tensor, start: int) -> int:
        """Tokens ids int64 [T] of sequence 0 from position `start`, chunk by chunk; the greedy token after them."""
        table, pool = contexts.tables[0], contexts.pool
        for first in range(0, len(ids), self._chunk_tokens):
            part = ids[first : first + self._chunk_tokens]
            logits = self.model.prefill(part, start + first, table, pool)
        return int(logits.argmax())

    def chosen(self, contexts: Contexts, ids: Tensor) -> list[Tensor]:
        """Experts [B, k] that a step from ids chooses in each MoE layer."""
        trace = Trace()
        self._step(contexts, ids, contexts.tokens, trace)
        return trace.chosen

    def operators_ms(self, contexts: Contexts, ids: Tensor, steps: int) -> dict[str, float]:
        """Time of a step by operator of `floors`, and of all others as `norms, residuals`: on the device where it is a
        GPU, launches and gaps not counted; else in all."""
        on_gpu = self.model.device.type == "cuda"
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
        with _labelled(), profile(activities=activities, acc_events=True) as seen:
            for step in range(steps):
                with record_function("step"):
                    self._step(contexts, ids, contexts.tokens + step).argmax(1).cpu()
        spent = dict.fromkeys(("step", *OPERATORS), 0.0)
        for event in seen.events() or ():
            if event.name in spent and event.device_type.name == "CPU":
                spent[event.name] += (event.device_time_total if on_gpu else event.cpu_time_total) / 1e3 / steps
        for inner, outer in INSIDE.items():
            spent[outer] -= spent[inner]
        rest = spent.pop("step") - sum(spent.values())
        return {**spent, "norms, residuals": rest}

    def _step(self, contexts: Contexts, ids: Tensor, at: int, trace: Trace | None = None) -> Tensor:
        return self.model.decode(ids, [at] * len(ids), contexts.tables, contexts.pool, trace)


@contextmanager
def _labelled() -> Iterator[None]:
    """Names every operator for the profiler, while it looks: labels cost some microseconds each."""
    with ExitStack() as undo:
        for name, places in OPERATORS.items():
            for owner, attribute in places:
                original = getattr(owner, attribute)
                setattr(owner, attribute, record_function(name)(original))
                undo.callback(setattr, owner, attribute, original)
        yield

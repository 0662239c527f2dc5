"""The exact model as the engine's measurements drive it."""

import itertools
from collections.abc import Callable

from torch import Tensor

from forebay.kernels import moe
from forebay.workers import attention, model, step_pages
from forebay.workers.engine_plan import Mode
from forebay.workers.made_contexts import Contexts, made_contexts
from forebay.workers.model import Model
from forebay.workers.operator_times import Operators, OperatorTimes
from forebay.workers.residual import Trace
from forebay.workers.sequence_model import SequenceModel

REST = "norms, residuals, page tables"
OPERATORS = Operators(
    places={
        REST: ((Model, "decode"),),
        "KDA projections": ((attention.Attention, "kda"),),
        "KDA states": (
            (attention.Recurrent, "recur"),
            (step_pages.StepStates, "read"),
            (step_pages.StepStates, "write"),
        ),
        "latent projections": ((attention.Attention, "latent"),),
        "latent rows": ((attention.Recurrent, "attend"), (attention.Attention, "_attend_chosen")),
        "index keys": ((attention.Attention, "_choose"),),
        "dense MLP, router and shared experts": ((model, "_mlp"),),
        "routed experts": ((moe, "experts"),),
        "head": ((Model, "_logits"),),
    },
    inside={
        "KDA projections": REST,
        "latent projections": REST,
        "dense MLP, router and shared experts": REST,
        "head": REST,
        "KDA states": "KDA projections",
        "latent rows": "latent projections",
        "index keys": "latent projections",
        "routed experts": "dense MLP, router and shared experts",
    },
)


def prefill_chunks(of: SequenceModel, contexts: Contexts, ids: Tensor, start: int, chunk_tokens: int) -> int:
    """Tokens ids int64 [T] of sequence 0 from position `start`, chunk by chunk; the greedy token after them."""
    table, pool = contexts.tables[0], contexts.pool
    for first in range(0, len(ids), chunk_tokens):
        logits = of.prefill(ids[first : first + chunk_tokens], start + first, table, pool)
    return int(logits.argmax())


class ExactEngine:
    mode: Mode = "exact"

    def __init__(self, of: Model, chunk_tokens: int) -> None:
        self.model, self.layout, self._chunk_tokens = of, of.layout, chunk_tokens

    def made_contexts(self, batch: int, tokens: int, capacity: int) -> Contexts:
        m = self.model
        return made_contexts(m.shape, m.layout, m.dtype, m.device, batch, tokens, capacity)

    def decoding(self, contexts: Contexts, ids: Tensor) -> Callable[[int], None]:
        """`Engine.decoding`."""
        at = itertools.count(contexts.tokens)
        last = ids

        def run(n: int) -> None:
            nonlocal last
            for _ in range(n):
                last = self._step(contexts, last, next(at)).argmax(1)
            last.cpu()

        return run

    def prefill(self, contexts: Contexts, ids: Tensor, start: int) -> int:
        """`Engine.prefill`."""
        return prefill_chunks(self.model, contexts, ids, start, self._chunk_tokens)

    def chosen(self, contexts: Contexts, ids: Tensor) -> list[Tensor]:
        """`Engine.chosen`."""
        trace = Trace()
        self._step(contexts, ids, contexts.tokens, trace)
        return trace.chosen

    def operators_ms(self, contexts: Contexts, ids: Tensor, steps: int) -> dict[str, float]:
        """`Engine.operators_ms`."""
        times = OperatorTimes(OPERATORS, self.model.device, in_graph=False)
        spent = dict.fromkeys(OPERATORS.places, 0.0)
        with times.watching():
            for step in range(steps):
                times.restart()
                self._step(contexts, ids, contexts.tokens + step).cpu()
                spent = {name: spent[name] + ms / steps for name, ms in times.ms().items()}
        return spent

    def _step(self, contexts: Contexts, ids: Tensor, at: int, trace: Trace | None = None) -> Tensor:
        return self.model.decode(ids, [at] * len(ids), contexts.tables, contexts.pool, trace)

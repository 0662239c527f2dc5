"""Golden data, all sets: the operators' (`kernels.golden`) and the whole models' (`kimi_linear_tiny`, `k3_tiny`).

A model set fixes one knob: its references build the latent norms with eps 1e-6. Each folder is run with it, then again
with rms_norm_eps (1e-5, what vLLM and SGLang do) against the float64 values stored for that. Every case names its knob.
Greedy tokens go through prefill and then decode, so both passes are held to the same numbers.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from forebay.kernels import norms
from forebay.kernels.golden import SETS, Case, compare, not_run, run_set
from forebay.kvstore.device import DevicePool
from forebay.workers.config_fields import FolderError
from forebay.workers.model import Model, load_model
from forebay.workers.residual import Trace
from forebay.workers.step_pages import PageTable

BLOCK_TOKENS = 64
REFERENCE_EPS, SERVING_EPS = 1e-6, 1e-5
Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class _ModelSet:
    """`variants` are checkpoint folders; `expected` where the numbers stand (one for all, or one beside each).
    Tolerances: as the set's README suggests for logits; for hidden states and what is made of them (KDA states, mixes),
    three times what its two references differ by in hidden states."""

    variants: tuple[str, ...]
    logits: float
    hidden: float
    shared_numbers: bool


MODEL_SETS = {
    "kimi_linear_tiny": _ModelSet(("hf_saved", "released_names"), logits=3e-4, hidden=4e-4, shared_numbers=True),
    "k3_tiny": _ModelSet(("bf16", "mxfp4"), logits=1e-3, hidden=6e-5, shared_numbers=False),
}
NOT_YET_RUN = {"vision_tiny": "not yet run: the vision tower is not served yet"}
MIX_TOLERANCE = 4e-5


def check_golden(folder: Path, device: str = "cpu") -> list[Case]:
    """Every case of the sets that stand under `folder`; the models run on `device`. FolderError where none does."""
    known = [name for name in (*SETS, *MODEL_SETS, *NOT_YET_RUN) if (folder / name).is_dir()]
    if not known:
        raise FolderError(f"{folder}: none of the golden sets {', '.join((*SETS, *MODEL_SETS, *NOT_YET_RUN))}")
    with _one_thread():
        return [case for name in known for case in _run(folder / name, device)]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Tensors this small make a second thread wait more than work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _run(folder: Path, device: str) -> Iterable[Case]:
    if folder.name in SETS:
        return run_set(folder)
    if folder.name in MODEL_SETS:
        with torch.device(device):
            return [*_run_model_set(folder, MODEL_SETS[folder.name], device)]
    return [not_run(folder.name, NOT_YET_RUN[folder.name])]


def _run_model_set(folder: Path, model_set: _ModelSet, device: str) -> Iterator[Case]:
    for variant in model_set.variants:
        numbers = folder if model_set.shared_numbers else folder / variant
        expected = load_file(numbers / "expected.safetensors", device=device)
        prompts = json.loads((numbers / "prompts.json").read_text(encoding="utf-8"))["prompts"]
        for eps in (REFERENCE_EPS, SERVING_EPS):
            model = load_model(folder / variant, BLOCK_TOKENS, device=device, latent_norm_eps=eps)
            for prompt in prompts:
                run = _Run(f"{folder.name}/{variant} len{prompt['length']}", model, prompt, expected, model_set)
                yield from run.reference() if eps == REFERENCE_EPS else run.serving()


class _Run:
    """One prompt through one model: logits of every token, what the trace saw, and pages ready to decode on."""

    def __init__(
        self, name: str, model: Model, prompt: dict[str, Any], expected: Tensors, model_set: _ModelSet
    ) -> None:
        self._name, self._model, self._prompt, self._set = name, model, prompt, model_set
        suffix = f"_len{prompt['length']}"
        self._expected = {key.removesuffix(suffix): x for key, x in expected.items() if key.endswith(suffix)}
        self._ids = torch.tensor(prompt["ids"])
        self._pages, self._pool = _pages(model, len(self._ids) + len(prompt["greedy"]))
        self._trace = Trace()
        self._logits = model.prefill(self._ids, 0, self._pages, self._pool, all_logits=True, trace=self._trace)
        self._states = self._running_states()

    def reference(self) -> Iterator[Case]:
        """Against the references' own eps."""
        yield self._compare("logits_last4", self._logits[-4:], self._set.logits)
        yield self._compare("logits_last4_f64", self._logits[-4:], self._set.logits)
        yield from self._inside()
        yield from self._greedy(self._prompt["greedy"], "greedy_step_logits")

    def serving(self) -> Iterator[Case]:
        """Against the float64 restatement with eps 1e-5."""
        yield self._compare("logits_last4_f64_mla_eps1e-5", self._logits[-4:], self._set.logits)
        same = self._prompt.get("greedy_same_with_mla_eps_1e5")
        greedy = self._prompt.get("greedy_with_mla_eps_1e5", self._prompt["greedy"] if same else None)
        if greedy is not None:
            yield from self._greedy(greedy, None)

    def _inside(self) -> Iterator[Case]:
        prefixes = torch.stack(self._trace.prefixes)
        yield self._compare("hidden_norms", prefixes.norm(dim=-1), self._set.hidden)
        yield self._compare("hidden_last_token", prefixes[:, -1], self._set.hidden)
        # A first run's states; the K3 sets hold those of two further runs behind them.
        first_run = self._expected["kda_final_state"][: len(self._states)]
        yield compare(f"{self._name} kda_final_state", self._states, first_run, self._set.hidden, self._knob)
        if self._trace.mixes:
            yield from self._mixes()

    def _mixes(self) -> Iterator[Case]:
        outputs = torch.stack([mixed[-1] for _, _, mixed in self._trace.mixes])
        yield self._compare("attnres_outputs_last_token", outputs, self._set.hidden)
        normed = norms.rms_norm(outputs[-1:], self._model.weights.norm, self._model.shape.norm_eps)[0]
        yield self._compare("final_normed_last_token", normed, self._set.hidden)
        expected = self._expected["attnres_weights_last_token"]
        weights = torch.stack([self._source_weights(mix, expected.shape[1]) for mix in self._trace.mixes])
        yield self._compare("attnres_weights_last_token", weights, MIX_TOLERANCE)

    def _source_weights(self, mix: tuple[tuple[Tensor, ...], Tensor, Tensor], width: int) -> Tensor:
        """How much the last token's mix took of each source, -1 where there is none [width]: the formula, over the
        sources and the pseudo-query that the model used."""
        sources, query, _ = mix
        last = torch.stack([source[-1] for source in sources]).float()
        scores = (last @ query) * torch.rsqrt(last.square().mean(-1) + self._model.shape.norm_eps)
        found = scores.softmax(-1)
        return torch.cat((found, found.new_full((width - len(found),), -1.0)))

    def _greedy(self, expected: Sequence[int], key: str | None) -> Iterator[Case]:
        """Decode along; tokens must be equal, and the logits that chose them within the tolerance where stored."""
        rows = [self._logits[-1]]
        for step in range(len(expected) - 1):
            token, position = rows[-1].argmax()[None], len(self._ids) + step
            rows.append(self._model.decode(token, [position], [self._pages], self._pool)[0])
        steps = torch.stack(rows)
        tokens = steps.argmax(-1)
        differing = float((tokens != torch.tensor(expected)).sum())
        name = f"{self._name} greedy tokens"
        yield Case(
            name=name, error=differing, tolerance=0.0, passed=differing == 0, detail=f"tokens that differ; {self._knob}"
        )
        if key is not None:
            yield self._compare(key, steps, self._set.logits)

    def _compare(self, key: str, found: Tensor, tolerance: float) -> Case:
        return compare(f"{self._name} {key}", found, self._expected[key], tolerance, self._knob)

    @property
    def _knob(self) -> str:
        return f"latent norms' eps {self._model.shape.latent_norm_eps:g}"

    def _running_states(self) -> Tensor:
        """The recurrent states [KDA layers, H, K, V] as the prompt left them, by rising layer."""
        kda = self._model.shape.kda
        states = self._pool.field(torch.float32, (kda.heads, kda.head_dim, kda.head_dim))
        pages = {
            layer: int(self._pages[group.name][place, 0])
            for group in self._model.layout.states
            for place, layer in enumerate(group.layers)
        }
        return torch.stack([states[pages[layer]] for layer in self._model.shape.kda_layers])


def _pages(model: Model, n_tokens: int) -> tuple[PageTable, DevicePool]:
    """A pool of one sequence's pages, in order."""
    table: PageTable = {}
    taken = 0
    counts = {group.name: (len(group.layers), -(-n_tokens // group.page_tokens)) for group in model.layout.paged}
    counts |= {group.name: (len(group.layers), 1) for group in model.layout.states}
    for name, (layers, pages) in counts.items():
        table[name] = np.arange(taken, taken + layers * pages, dtype=np.int32).reshape(layers, pages)
        taken += layers * pages
    return table, DevicePool(model.layout, taken, model.device)

"""The training file's rows on the device, and the order in which they are taken: a function of the seed alone."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forebay.workers.train_step import Inputs

WEIGHT_UNIT = 0.1
PROBE_SHARE = 16  # one token in so many teaches the indexer


class Rows:
    """Rows of one length. `take(step)` fills `inputs`; each pass over the rows has its own order."""

    def __init__(self, ids: Tensor, weights: Tensor, batch: int, seed: int) -> None:
        self.ids, self.weights, self.batch, self.seed = ids, weights, min(batch, len(ids)), seed
        length = ids.shape[1]
        self.inputs = Inputs(
            ids=torch.zeros(length, self.batch, dtype=torch.int64, device=ids.device),
            weights=torch.zeros(length, self.batch, device=ids.device),
            probes=torch.zeros(self.batch, max(1, length // PROBE_SHARE), dtype=torch.int64, device=ids.device),
        )

    def chosen(self, step: int) -> NDArray[np.int64]:
        """The rows of a step, [batch]."""
        per_pass = len(self.ids) // self.batch
        turn, place = divmod(step, per_pass)
        order = np.random.default_rng((self.seed, turn)).permutation(len(self.ids))
        return order[place * self.batch : (place + 1) * self.batch]

    def take(self, step: int) -> Inputs:
        rows = torch.from_numpy(self.chosen(step)).to(self.ids.device)
        weights = self.weights[rows].float() * WEIGHT_UNIT
        self.inputs.ids.copy_(self.ids[rows].t())
        self.inputs.weights.copy_(weights.t())
        self.inputs.probes.copy_(self._probes(weights, step))
        return self.inputs

    def _probes(self, weights: Tensor, step: int) -> Tensor:
        """Random times of each row, those that count as targets next being likelier."""
        random = torch.Generator(self.ids.device).manual_seed(self.seed * 1_000_003 + step)
        noise = torch.rand(weights.shape, generator=random, device=weights.device).log()
        following = torch.cat((weights[:, 1:], torch.zeros_like(weights[:, :1])), dim=1)
        chosen: Tensor = (noise / (following + 0.02)).topk(self.inputs.probes.shape[1], dim=1).indices
        return chosen.sort(dim=1).values


def load_rows(file: Any, name: str, batch: int, seed: int, device: torch.device) -> Rows:
    """The rows `name` of an opened training file."""
    ids = torch.from_numpy(file[f"{name}_ids"].astype(np.int32)).to(device)
    return Rows(ids, torch.from_numpy(file[f"{name}_weights"]).to(device), batch, seed)


def open_file(path: Path) -> Any:
    return np.load(path, allow_pickle=False)

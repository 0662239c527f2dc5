"""What the two loops need of a model: `workers.model.Model` is one, and so is the tests' model of hashes."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from forebay.kvstore.device import DevicePool
from forebay.kvstore.layout import Layout
from forebay.workers.step_pages import PageTable

Watch = Callable[[str, int, npt.NDArray[np.float32]], None]
"""Called before a token is chosen, with the job's id, the position that the token will have, and its logits [vocab]."""


class SequenceShape(Protocol):
    @property
    def vocab(self) -> int: ...
    @property
    def context_tokens(self) -> int: ...


class SequenceModel(Protocol):
    """Exact mode's promise: a row of logits is a function of its sequence, never of its company or of the split."""

    @property
    def shape(self) -> SequenceShape: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def fingerprint(self) -> bytes: ...
    @property
    def device(self) -> torch.device: ...

    def prefill(self, ids: torch.Tensor, start: int, pages: PageTable, pool: DevicePool) -> torch.Tensor:
        """ids int64 [T] at positions start.. (a block end) -> logits fp32 [vocab] after the last. Writes the pages."""
        ...

    def decode(
        self, ids: torch.Tensor, positions: Sequence[int], pages: Sequence[PageTable], pool: DevicePool
    ) -> torch.Tensor:
        """One token of each of B sequences: ids int64 [B] -> logits fp32 [B, vocab]. Writes their pages."""
        ...

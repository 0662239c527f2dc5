"""Planted faults for `resume_check`: a prefill worker that damages what a hit restored, before anything reads it."""

from functools import partial
from typing import Literal, get_args

import torch

from forebay.kvstore.arena import Arena
from forebay.kvstore.device import DevicePool
from forebay.kvstore.layout import INDEX, Layout
from forebay.kvstore.store import Lease
from forebay.workers.config import WorkerConfig
from forebay.workers.prefill import PrefillWorker, Prompt
from forebay.workers.sequence_model import SequenceModel, Watch

Plant = Literal["flip", "skip-kda", "short-index"]
PLANTS: tuple[Plant, ...] = get_args(Plant)


class PlantedPrefillWorker(PrefillWorker):
    def __init__(
        self, model: SequenceModel, config: WorkerConfig, arena: Arena, watch: Watch | None = None, *, plant: Plant
    ) -> None:
        super().__init__(model, config, arena, watch)
        self._plant = plant

    def _arrive(self, prompt: Prompt, lease: Lease) -> None:
        super()._arrive(prompt, lease)
        if lease.hit_tokens:
            _DAMAGE[self._plant](self.memory.pool, lease)


def _flip(pool: DevicePool, lease: Lease) -> None:
    """The sign bit of an element of the hit's last latent row in the first global layer."""
    group = pool.layout.paged[0]
    span, row = divmod(lease.hit_tokens - 1, group.page_tokens)
    pool.bytes[int(lease.pages[group.name][0, span]), row * group.row_bytes + 3] ^= 0x80


def _skip_kda(pool: DevicePool, lease: Lease) -> None:
    """The first KDA layer's running state stays at zero."""
    group = pool.layout.states[0]
    pool.bytes[int(lease.pages[group.name][0, 0])] = 0


def _short_index(pool: DevicePool, lease: Lease) -> None:
    """The index keys of the hit's last block are missing in every global layer."""
    group = pool.paged_group(INDEX)
    tokens = torch.arange(lease.hit_tokens - pool.layout.block_tokens, lease.hit_tokens)
    pages = torch.from_numpy(lease.pages[INDEX].astype("int64"))[:, tokens // group.page_tokens]
    rows = pool.rows(INDEX, torch.uint8, group.row_bytes)
    rows[pages, tokens % group.page_tokens] = 0


_DAMAGE = {"flip": _flip, "skip-kda": _skip_kda, "short-index": _short_index}


def worker_with(plant: Plant | None, layout: Layout) -> "type[PrefillWorker] | partial[PlantedPrefillWorker]":
    """The maker of a prefill worker with that fault, or of an honest one. ValueError if the model cannot have it."""
    if plant is None:
        return PrefillWorker
    if plant == "short-index" and all(group.name != INDEX for group in layout.paged):
        raise ValueError("plant short-index: this model has no index keys")
    return partial(PlantedPrefillWorker, plant=plant)

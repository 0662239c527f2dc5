"""What prefetch gains: prompts queue for a device that holds one of them, and their states lie on the SSD.

The model stands in for one on a GPU: its chunks take time in which the CPU is free. Everything else is the real worker.
Rounds with and without prefetch take turns, each in a worker that starts anew, so that nothing lies above the SSD.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from forebay.kvstore.arena import Arena
from forebay.kvstore.config import StoreConfig
from forebay.kvstore.device import DevicePool
from forebay.kvstore.layout import Layout, make_layout
from forebay.ops.bench_report import Reference, Row
from forebay.workers.config import WorkerConfig
from forebay.workers.job import Holder, Job, Sampling
from forebay.workers.outcome import Prefilled
from forebay.workers.prefill import PrefillWorker
from forebay.workers.step_pages import PageTable

ROUNDS = 5
CHUNK_S = 0.06
BLOCK = 512
TAIL_TOKENS = 256
VOCAB = 64
OWNER = Holder(name="bench", epoch=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    vocab: int = VOCAB
    context_tokens: int = 1 << 20


class _Timed:
    """A chunk takes `chunk_s`, and its logits say nothing."""

    fingerprint = b"bench"
    device = torch.device("cpu")
    shape = _Shape()

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.chunk_s = 0.0

    def prefill(self, ids: torch.Tensor, start: int, pages: PageTable, pool: DevicePool) -> torch.Tensor:
        time.sleep(self.chunk_s)
        return torch.zeros(self.shape.vocab)

    def decode(
        self, ids: torch.Tensor, positions: Sequence[int], pages: Sequence[PageTable], pool: DevicePool
    ) -> torch.Tensor:
        raise AssertionError("only prefill is measured")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """Seconds a prompt, means: from the queue to its first token, and at its turn until its state was there."""

    first_token_s: float
    restore_s: float


def bench_prefetch(folder: Path, jobs: int = 8, blocks: int = 8) -> Iterator[Row]:
    """Rows for the report, medians over ROUNDS. The SSD is the disk on which `folder` lies."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else None) as memory:
        bench = _Bench(folder, Path(memory), jobs, blocks * BLOCK)
        bench.fill()
        rounds = [(bench.round(prefetch=False), bench.round(prefetch=True)) for _ in range(ROUNDS)]

    def median(name: str, prefetch: bool) -> float:
        return float(statistics.median(getattr(each[prefetch], name) for each in rounds))

    what = f"queue of {jobs} prompts of {bench.prompt_bytes >> 20} MiB on the SSD"
    for name, told in (("first_token_s", "mean time to first token"), ("restore_s", "mean restore at the turn")):
        yield Row(
            name=f"prefetch, {what}, {told}",
            value=median(name, True),
            unit="s",
            reference=Reference(name="without prefetch", value=median(name, False)),
        )


class _Bench:
    def __init__(self, folder: Path, memory: Path, jobs: int, n_tokens: int) -> None:
        layout = make_layout(
            block_tokens=BLOCK,
            global_layers=(3, 7, 11, 15),
            kda_layers=tuple(layer for layer in range(16) if layer % 4 != 3),
            latent_row_bytes=1152,
            index_row_bytes=None,
            state_bytes=1 << 20,
        )
        self._model, self._jobs, self._n_tokens, self._memory = _Timed(layout), jobs, n_tokens, memory
        pages = layout.pages_for(n_tokens) + layout.state_pages
        self.prompt_bytes = pages * layout.page_bytes
        # Beside a prompt: the checkpoints it keeps, and pages that its end shares.
        device_pages = layout.pages_for(n_tokens + BLOCK) + 3 * layout.state_pages + pages // 4
        self._store = StoreConfig(
            device_bytes=device_pages * layout.page_bytes,
            host_bytes=4 * self.prompt_bytes,
            handoff_bytes=2 * self.prompt_bytes,
            run_dir=str(memory),
            checkpoints="prompt_end",
            ssd_path=str(folder),
            ssd_bytes=4 * jobs * self.prompt_bytes,
            ssd_write="write_through",
            ssd_queue_bytes=2 * self.prompt_bytes,
        )
        self._rounds = 0

    def fill(self) -> None:
        """All prompts to the SSD, by a worker that has room for all."""
        store = replace(self._store, device_bytes=self._jobs * self._store.device_bytes)
        with Arena(self._memory, "bench", self._store.handoff_bytes) as arena:
            worker = self._worker(store, arena, 0)
            for number in range(self._jobs):
                self._run(worker, [self._job(number, self._n_tokens)])
                assert worker.memory.ssd is not None
                assert worker.memory.ssd.log.flush(), worker.memory.ssd_failure
            worker.close()

    def round(self, *, prefetch: bool) -> _Round:
        self._rounds += 1
        with Arena(self._memory, "bench", self._store.handoff_bytes) as arena:
            worker = self._worker(self._store, arena, 2 * self.prompt_bytes if prefetch else 0)
            self._model.chunk_s = CHUNK_S
            jobs = [self._job(number, self._n_tokens + TAIL_TOKENS) for number in range(self._jobs)]
            taken = self._run(worker, jobs)
            self._model.chunk_s = 0.0
            stats = worker.stats()
            worker.close()
        assert stats.cached_tokens == self._jobs * self._n_tokens, "all was found"
        return _Round(first_token_s=statistics.mean(taken), restore_s=sum(stats.store.restore_s.values()) / self._jobs)

    def _worker(self, store: StoreConfig, arena: Arena, prefetch_bytes: int) -> PrefillWorker:
        config = WorkerConfig(block_tokens=BLOCK, chunk_tokens=BLOCK, store=store, prefetch_bytes=prefetch_bytes)
        return PrefillWorker(self._model, config, arena)

    def _job(self, number: int, n_tokens: int) -> Job:
        """Of the same number the same prompt, up to a tail that is new in each round."""
        ids = np.random.default_rng(number).integers(0, VOCAB, n_tokens, dtype=np.int32)
        ids[self._n_tokens :] = self._rounds % VOCAB
        sampling = Sampling(max_tokens=1)
        return Job(id=str(number), ids=ids, n_prompt=n_tokens, seed=0, sampling=sampling, timeout_s=600.0)

    def _run(self, worker: PrefillWorker, jobs: list[Job]) -> list[float]:
        """Seconds from the queue to each first token."""
        taken: list[float] = []
        start = time.perf_counter()
        for job in jobs:
            assert worker.submit(job, OWNER, 0.0) is None
        while len(taken) < len(jobs):
            for outcome in worker.step(0.0):
                assert isinstance(outcome, Prefilled), outcome
                taken.append(time.perf_counter() - start)
                worker.release_handoff(outcome.job_id)
        return taken

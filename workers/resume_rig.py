"""What the resume check works with: prompts of one model, workers of every size, and answers with their logits."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from forebay.kvstore.config import StoreConfig
from forebay.kvstore.device import DevicePool
from forebay.kvstore.layout import Layout
from forebay.workers.config import Transfer, WorkerConfig
from forebay.workers.job import Job, Sampling
from forebay.workers.local import Completion, LocalPair
from forebay.workers.resume_plants import Plant, worker_with
from forebay.workers.sequence_model import SequenceModel
from forebay.workers.step_pages import PageTable

PAGES = 3
"""Pages of latent rows that the longest prompt fills, and one token more."""

RECORD_BYTES = 1 << 13
"""What a record on the SSD takes beside its pages, at most."""

POOL_BYTES = 256 << 20
"""What each worker gives to the pool."""

POOL_ASK_S = 10.0
"""The check waits for what the pool has, where a worker that serves would go on."""

COMPANY = 7
ANSWER_TOKENS = 3

Ids = npt.NDArray[np.int32]
Rows = list[npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Answer:
    completion: Completion
    rows: Rows


class Record:
    """A watch that keeps every row of logits by job, and the order in which jobs had theirs."""

    def __init__(self) -> None:
        self.rows: dict[str, Rows] = defaultdict(list)
        self.order: list[str] = []

    def __call__(self, job_id: str, position: int, row: npt.NDArray[np.float32]) -> None:
        self.rows[job_id].append(row.copy())
        self.order.append(job_id)

    def clear(self) -> None:
        self.rows.clear()
        self.order.clear()

    def company_of(self, job_id: str) -> int:
        """The fewest other jobs that had a row between two of this one's, so stood beside it in a decode step."""
        own = [place for place, name in enumerate(self.order) if name == job_id]
        return min(len(set(self.order[a + 1 : b])) for a, b in pairwise(own))


class Rig:
    """Makes prompts and workers of one model; `fresh` answers from workers that hold nothing."""

    def __init__(
        self,
        model: SequenceModel,
        run_dir: str,
        plant: Plant | None,
        threads: int,
        transfer: Transfer = "shared_memory",
    ) -> None:
        self.model, self._run_dir, self._threads, self._transfer = model, run_dir, threads, transfer
        self.block = model.layout.block_tokens
        self.longest = PAGES * model.layout.paged[0].page_tokens + 1
        self._worker = worker_with(plant, model.layout)
        self._fresh: dict[tuple[bytes, float], Answer] = {}

    def ids(self, n_tokens: int, seed: int) -> Ids:
        return np.random.default_rng(seed).integers(0, self.model.shape.vocab, n_tokens, dtype=np.int32)

    def job(self, name: str, ids: Ids, *, temperature: float = 0.0, max_tokens: int = ANSWER_TOKENS) -> Job:
        sampling = Sampling(temperature=temperature, max_tokens=max_tokens)
        return Job(id=name, ids=ids, n_prompt=len(ids), seed=len(ids), sampling=sampling, timeout_s=3600.0)

    @contextmanager
    def pair(
        self,
        checkpoints: str = "prompt_end",
        *,
        device_pages: int = 0,
        host_pages: int = 0,
        ssd_pages: int = 0,
        pool: str | None = None,
    ) -> Iterator[tuple[LocalPair, Record]]:
        """`pool`: the address of a Mooncake master."""
        record = Record()
        config = self._config(checkpoints, device_pages or self._ample_pages(), host_pages, ssd_pages, pool)
        with LocalPair(self.model, config, record, self._worker) as pair:
            yield pair, record

    def fresh(self, job: Job) -> Answer:
        key = job.ids.tobytes(), job.sampling.temperature
        if key not in self._fresh:
            with self.pair() as (pair, record):
                self._fresh[key] = Answer(pair.run(job), record.rows[job.id])
        return self._fresh[key]

    def target(self) -> Job:
        return self.job("target", self.ids(self.longest, seed=0))

    def filling(self) -> Job:
        """A prompt that takes every page of a `narrow` device."""
        return self.job("filling", self.ids(self.narrow()[1], seed=1))

    def narrow(self) -> tuple[int, int]:
        """Pages for the longest prompt and its states, and the tokens of a prompt that takes them all."""
        layout = self.model.layout
        ends = len(layout.paged) * len(layout.paged[0].layers)  # in which a hit ends: copied, so held twice
        pages = layout.pages_for(self.longest + ANSWER_TOKENS) + 3 * layout.state_pages + ends
        n_tokens = self.longest
        while layout.pages_for(n_tokens + self.block) + layout.state_pages <= pages:
            n_tokens += self.block
        return pages, n_tokens

    def _ample_pages(self) -> int:
        layout = self.model.layout
        sequences = (COMPANY + 2) * (layout.pages_for(2 * self.longest) + 3 * layout.state_pages)
        return sequences + self.longest // self.block * layout.state_pages

    def _config(
        self, checkpoints: str, device_pages: int, host_pages: int, ssd_pages: int, pool: str | None
    ) -> WorkerConfig:
        page_bytes = self.model.layout.page_bytes
        store = StoreConfig(
            device_bytes=device_pages * page_bytes,
            host_bytes=host_pages * page_bytes,
            ssd_path=f"{self._run_dir}/ssd" if ssd_pages else None,
            ssd_bytes=ssd_pages * (page_bytes + RECORD_BYTES),
            ssd_queue_bytes=1 << 24,
            pool=pool,
            pool_segment_bytes=POOL_BYTES,
            pool_ask_s=POOL_ASK_S,
            handoff_bytes=self._ample_pages() // 2 * page_bytes,
            run_dir=self._run_dir,
            checkpoints=checkpoints,
        )
        return WorkerConfig(
            block_tokens=self.block,
            threads=self._threads,
            store=store,
            chunk_tokens=4 * self.block,
            slots=COMPANY + 1,
            handoff=self._transfer,
        )

    def straight(self, job: Job, answer: Answer) -> Answer:
        """The rows of `answer` from the model alone: the prompt in one call, then the answer's ids one by one."""
        device, model = self.model.device, self.model
        pages, pool = _own_pages(model.layout, job.n_prompt + ANSWER_TOKENS, device)
        rows = [model.prefill(torch.from_numpy(job.ids.astype(np.int64)).to(device), 0, pages, pool)]
        for position, token in enumerate(answer.completion.ids[:-1], start=job.n_prompt):
            rows.append(model.decode(torch.tensor([token], device=device), [position], [pages], pool)[0])
        return Answer(answer.completion, [row.cpu().numpy() for row in rows])


def _own_pages(layout: Layout, n_tokens: int, device: torch.device) -> tuple[PageTable, DevicePool]:
    """Pages in rising order, of a pool that holds this one sequence."""
    shapes = {group.name: (len(group.layers), -(-n_tokens // group.page_tokens)) for group in layout.paged}
    shapes |= {group.name: (len(group.layers), 1) for group in layout.states}
    pages, first = {}, 0
    for name, (layers, spans) in shapes.items():
        pages[name] = np.arange(first, first + layers * spans, dtype=np.int32).reshape(layers, spans)
        first += layers * spans
    return pages, DevicePool(layout, first, device)

"""The store's canary: what a warm resume computes equals what a cold run computes, bit for bit in the logits.

Every case sends a prompt to workers that hold part of it, and to fresh ones, and compares each row of logits that a
token was chosen from: the prefill's last row, and the decode rows behind the handoff. It states the rule that gives the
boundary at which the prompt must have been resumed, and fails unless the cached tokens are that boundary.

A plant damages restored bytes before anything is computed from them, to show that the check sees it.
"""

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from forebay.kvstore.config import StoreConfig
from forebay.workers.config import WorkerConfig
from forebay.workers.job import Job, Sampling
from forebay.workers.local import Completion, LocalPair
from forebay.workers.model import load_model
from forebay.workers.resume_plants import Plant, worker_with
from forebay.workers.sequence_model import SequenceModel

Ids = npt.NDArray[np.int32]
Rows = list[npt.NDArray[np.float32]]

PAGES = 3
"""Pages of latent rows that the longest prompt fills, and one token more."""

TURNS = 4
COMPANY = 7
ANSWER_TOKENS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    passed: bool
    detail: str


def check_resume(
    model: str, plant: Plant | None = None, on_case: Callable[[Case], None] | None = None, block_tokens: int = 32
) -> list[Case]:
    """Load the folder or built-in model and run every case. `on_case` hears each as it is known."""
    return run_cases(load_model(model, block_tokens, torch.float32, "cpu"), plant, on_case)


def run_cases(
    model: SequenceModel, plant: Plant | None = None, on_case: Callable[[Case], None] | None = None
) -> list[Case]:
    cases = []
    with tempfile.TemporaryDirectory(prefix="forebay-check-") as run_dir:
        bench = _Bench(model, run_dir, plant)
        for group in (_same_prompt_again, _longer_prompt_held, _in_company, _turns, _from_host):
            for case in group(bench):
                cases.append(case)
                if on_case is not None:
                    on_case(case)
    return cases


class _Record:
    """A watch that keeps every row of logits by job."""

    def __init__(self) -> None:
        self.rows: dict[str, Rows] = defaultdict(list)

    def __call__(self, job_id: str, position: int, row: npt.NDArray[np.float32]) -> None:
        self.rows[job_id].append(row.copy())


@dataclass(frozen=True, slots=True)
class _Answer:
    completion: Completion
    rows: Rows


class _Bench:
    """Makes prompts and workers of one model; `fresh` answers from workers that hold nothing."""

    def __init__(self, model: SequenceModel, run_dir: str, plant: Plant | None) -> None:
        self.model, self.run_dir = model, run_dir
        self.block = model.layout.block_tokens
        self.longest = PAGES * model.layout.paged[0].page_tokens + 1
        self._worker = worker_with(plant, model.layout)

    def ids(self, n_tokens: int, seed: int) -> Ids:
        return np.random.default_rng(seed).integers(0, self.model.shape.vocab, n_tokens, dtype=np.int32)

    def job(self, name: str, ids: Ids, temperature: float = 0.0) -> Job:
        sampling = Sampling(temperature=temperature, max_tokens=ANSWER_TOKENS)
        return Job(id=name, ids=ids, n_prompt=len(ids), seed=len(ids), sampling=sampling, timeout_s=3600.0)

    @contextmanager
    def pair(
        self, checkpoints: str = "prompt_end", device_pages: int | None = None
    ) -> Iterator[tuple[LocalPair, _Record]]:
        record = _Record()
        config = self._config(checkpoints, device_pages or self._ample_pages())
        with LocalPair(self.model, config, record, self._worker) as pair:
            yield pair, record

    def fresh(self, job: Job) -> _Answer:
        with self.pair() as (pair, record):
            return _Answer(pair.run(job), record.rows[job.id])

    def one_prompt_pages(self) -> int:
        """So few pages that a second long prompt drives the first one out."""
        layout = self.model.layout
        return layout.pages_for(self.longest + ANSWER_TOKENS) + 3 * layout.state_pages + 2 * len(layout.paged[0].layers)

    def _ample_pages(self) -> int:
        layout = self.model.layout
        sequences = (COMPANY + 2) * (layout.pages_for(2 * self.longest) + 3 * layout.state_pages)
        return sequences + self.longest // self.block * layout.state_pages

    def _config(self, checkpoints: str, device_pages: int) -> WorkerConfig:
        page_bytes = self.model.layout.page_bytes
        store = StoreConfig(
            device_bytes=device_pages * page_bytes,
            host_bytes=4 * self._ample_pages() * page_bytes,
            handoff_bytes=self._ample_pages() * page_bytes,
            run_dir=self.run_dir,
            checkpoints=checkpoints,
        )
        return WorkerConfig(block_tokens=self.block, store=store, chunk_tokens=4 * self.block, slots=COMPANY + 1)


def _same_prompt_again(bench: _Bench) -> Iterator[Case]:
    rule = "the last block end before the prompt's last token"
    for name, n_prompt, boundary in _boundaries(bench):
        job = bench.job("target", bench.ids(bench.longest, seed=0)[:n_prompt])
        with bench.pair() as (pair, record):
            cold = _Answer(pair.run(job), record.rows.pop("target"))
            warm = _Answer(pair.run(job), record.rows.pop("target"))
        yield _case(f"again: {name}", rule, boundary, cold, warm)


def _longer_prompt_held(bench: _Bench) -> Iterator[Case]:
    rule = "a state is held at every block end: the last one before the prompt's last token"
    whole = bench.ids(bench.longest, seed=0)
    with bench.pair(f"interval:{bench.block}") as (pair, record):
        pair.run(bench.job("whole", whole))
        for name, n_prompt, boundary in _boundaries(bench):
            job = bench.job("target", whole[:n_prompt])
            warm = _Answer(pair.run(job), record.rows.pop("target"))
            yield _case(f"part of a longer: {name}", rule, boundary, bench.fresh(job), warm)


def _in_company(bench: _Bench) -> Iterator[Case]:
    rule = "the last block end before the prompt's last token"
    ids = bench.ids(bench.longest, seed=0)[: bench.longest - bench.block // 2]
    job = bench.job("target", ids, temperature=1.0)
    cold, boundary = bench.fresh(job), (len(ids) - 1) // bench.block * bench.block
    with bench.pair() as (pair, record):
        pair.run(job)
        for company in range(1, COMPANY + 1):
            record.rows.clear()
            others = [bench.job(f"other {i}", bench.ids(20 + 13 * i, seed=100 * company + i)) for i in range(company)]
            completion = pair.run_all([*others[: company // 2], job, *others[company // 2 :]])[company // 2]
            assert isinstance(completion, Completion), completion
            yield _case(f"beside {company} others", rule, boundary, cold, _Answer(completion, record.rows["target"]))


def _turns(bench: _Bench) -> Iterator[Case]:
    rule = "the last block end of the turn before"
    ids, boundary = bench.ids(bench.longest // 3, seed=5), 0
    with bench.pair("prompt_end+junction") as (pair, record):
        for turn in range(1, TURNS + 1):
            job = bench.job(f"turn {turn}", ids, temperature=1.0)
            warm = _Answer(pair.run(job), record.rows[job.id])
            yield _case(f"session: turn {turn}, {len(ids)} tokens", rule, boundary, bench.fresh(job), warm)
            boundary = len(ids) // bench.block * bench.block
            said = bench.ids(bench.block + 5 * turn, seed=turn)
            ids = np.concatenate([ids, np.array(warm.completion.ids, np.int32), said])


def _from_host(bench: _Bench) -> Iterator[Case]:
    """Two prompts drive each other from device to host memory and come back."""
    rule = "restored from host: the last block end before the prompt's last token"
    jobs = [bench.job(name, bench.ids(bench.longest, seed)) for name, seed in (("first", 11), ("second", 12))]
    cold = [bench.fresh(job) for job in jobs]
    boundary = (bench.longest - 1) // bench.block * bench.block
    with bench.pair(device_pages=bench.one_prompt_pages()) as (pair, record):
        for job in jobs:
            pair.run(job)
        for round_ in (1, 2):
            for job, expected in zip(jobs, cold, strict=True):
                record.rows.clear()
                in_host = _host_tokens(pair, job)
                case = _case(
                    f"host and back: {job.id}, round {round_}",
                    rule,
                    boundary,
                    expected,
                    _Answer(pair.run(job), record.rows[job.id]),
                )
                yield replace(case, passed=case.passed and in_host > 0, detail=f"{case.detail}; {in_host} from host")


def _host_tokens(pair: LocalPair, job: Job) -> int:
    store = pair.prefill.memory.store
    return store.lookup(store.chain(job.ids, job.salt), job.n_prompt).tier_tokens.get("host", 0)


def _boundaries(bench: _Bench) -> Iterator[tuple[str, int, int]]:
    """(name, prompt tokens, the block end before its last token) around every block end of the longest prompt."""
    for k in range(1, bench.longest // bench.block + 1):
        for offset, words in ((-1, "-1"), (0, ""), (1, "+1, a tail of one")):
            n_prompt = k * bench.block + offset
            yield f"{n_prompt} = {k}·{bench.block}{words}", n_prompt, (n_prompt - 1) // bench.block * bench.block


def _case(name: str, rule: str, boundary: int, cold: _Answer, warm: _Answer) -> Case:
    cached = warm.completion.cached_tokens
    difference = _difference(cold, warm)
    rows = f"{len(cold.rows)} rows of logits equal" if difference is None else difference
    return Case(
        name=name,
        passed=cached == boundary and difference is None,
        detail=f"cached {cached} of {boundary} ({rule}); {rows}",
    )


def _difference(cold: _Answer, warm: _Answer) -> str | None:
    """How the rows or tokens differ; None where every bit is equal."""
    assert len(cold.rows) == ANSWER_TOKENS
    if len(warm.rows) != len(cold.rows):
        return f"{len(warm.rows)} rows of logits, not {len(cold.rows)}"
    for number, (a, b) in enumerate(zip(cold.rows, warm.rows, strict=True)):
        if not np.array_equal(a.view(np.uint32), b.view(np.uint32)):
            return f"row {number} of logits differs by up to {np.abs(a - b).max():.3g}"
    return None if cold.completion.ids == warm.completion.ids else "equal logits, other tokens"

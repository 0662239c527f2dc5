"""Figures of one prefill and one decode worker in this process: no network, no Ray, no tokenizer.

The clock starts when a job is submitted to idle workers and stops when its tokens are in the caller's hands, so time to
first token holds the look-up, the restore, the prefill and the handoff.
"""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from forebay.kvstore.config import StoreConfig
from forebay.ops.bench_report import Row
from forebay.workers.config import WorkerConfig
from forebay.workers.job import Job, Sampling
from forebay.workers.local import LocalPair
from forebay.workers.model import Model, load_model
from forebay.workers.outcome import Emitted

PROMPT_TOKENS = 4096
REPEATS = 3
STREAMS = (1, 8)
STREAM_PROMPT_TOKENS = 256
STREAM_TOKENS = 128


def bench_workers(model: str, threads: int = 1, block_tokens: int = 32) -> list[Row]:
    """Rows for the report; a median of REPEATS where a figure is a time. Takes about a minute on the built-in model."""
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as run_dir:
        bench = _Bench(load_model(model, block_tokens, torch.float32, "cpu"), run_dir, threads)
        return [*_first_token(bench), *_streams(bench)]


@dataclass(frozen=True, slots=True)
class _Bench:
    model: Model
    run_dir: str
    threads: int

    def pair(self) -> LocalPair:
        layout = self.model.layout
        sequences = max(STREAMS) + REPEATS + 1
        pages = sequences * (layout.pages_for(PROMPT_TOKENS + STREAM_TOKENS) + 3 * layout.state_pages)
        n_bytes = pages * layout.page_bytes
        store = StoreConfig(device_bytes=n_bytes, handoff_bytes=n_bytes, run_dir=self.run_dir)
        config = WorkerConfig(block_tokens=layout.block_tokens, threads=self.threads, store=store, slots=max(STREAMS))
        return LocalPair(self.model, config)

    def job(self, name: str, n_prompt: int, max_tokens: int, seed: int) -> Job:
        ids = np.random.default_rng(seed).integers(0, self.model.shape.vocab, n_prompt, dtype=np.int32)
        sampling = Sampling(temperature=0.0, max_tokens=max_tokens)
        return Job(id=name, ids=ids, n_prompt=n_prompt, seed=seed, sampling=sampling, timeout_s=3600.0)


def _first_token(bench: _Bench) -> Iterator[Row]:
    cold, warm = [], []
    with bench.pair() as pair:
        pair.run(bench.job("warm-up", PROMPT_TOKENS // 4, 2, seed=0))
        for seed in range(1, REPEATS + 1):
            job = bench.job("first token", PROMPT_TOKENS, 1, seed)
            cold.append(_seconds(pair, job))
            warm.append(_seconds(pair, job))
    cold_s, warm_s = float(np.median(cold)), float(np.median(warm))
    yield Row(name=f"time to first token, {PROMPT_TOKENS}-token prompt, cold", value=cold_s * 1e3, unit="ms")
    yield Row(name=f"time to first token, {PROMPT_TOKENS}-token prompt, warm", value=warm_s * 1e3, unit="ms")
    yield Row(name=f"prefill, {PROMPT_TOKENS}-token prompt", value=PROMPT_TOKENS / cold_s, unit="tokens/s")


def _seconds(pair: LocalPair, job: Job) -> float:
    start = time.perf_counter()
    pair.run(job)
    return time.perf_counter() - start


def _streams(bench: _Bench) -> Iterator[Row]:
    """Tokens a second while all streams run: from the last stream's first token to the first stream's end."""
    for streams in STREAMS:
        jobs = [bench.job(f"stream {i}", STREAM_PROMPT_TOKENS, STREAM_TOKENS, seed=50 + i) for i in range(streams)]
        with bench.pair() as pair:
            tokens = _Arrivals(streams)
            pair.run_all(jobs, tokens)
        yield Row(name=f"decode, {streams} stream{'s' * (streams > 1)}", value=tokens.per_s(), unit="tokens/s")


class _Arrivals:
    """Hears tokens as they come and remembers when."""

    def __init__(self, streams: int) -> None:
        self._streams = streams
        self._seen: set[str] = set()
        self._times: list[float] = []
        self._over = False

    def __call__(self, emitted: Emitted) -> None:
        self._seen.add(emitted.job_id)
        if len(self._seen) == self._streams and not self._over:
            self._times += [time.perf_counter()] * len(emitted.tokens)
            self._over = emitted.finish is not None

    def per_s(self) -> float:
        return (len(self._times) - 1) / (self._times[-1] - self._times[0])

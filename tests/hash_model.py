"""A model whose logits are a hash of every byte that its pages hold: any wrong row, key or state changes the tokens.

It has the API of `workers.model.Model` and touches pages as that does: one row a token and global layer, one index key
a token, one running state a KDA layer. As in the real one, prefill and decode differ (here: in what they mix in).
`Straight` is its twin without pages, `answer` what a job must say by it.
"""

from functools import lru_cache

import numpy as np
import torch

from forebay.kvstore.config import StoreConfig
from forebay.kvstore.layout import make_layout
from forebay.workers.config import WorkerConfig
from forebay.workers.job import Job, Sampling
from forebay.workers.sampling import Sampler

VOCAB = 40
GLOBAL, KDA = (3, 6), (0, 1, 2, 4, 5)
PREFILL, DECODE = 0x51, 0xDE


class HashShape:
    vocab = VOCAB
    context_tokens = 400


def mix(x):
    """splitmix64's finaliser on uint64 arrays or numbers."""
    with np.errstate(over="ignore"):
        x = np.asarray(x, np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def row_hash(ids, positions, layer, mark):
    words = np.asarray(ids, np.uint64) * np.uint64(1009) + np.asarray(positions, np.uint64) * np.uint64(65537)
    return mix(words + np.uint64(layer * 7 + mark * 100003))


def next_state(state, token, layer, mark):
    return mix(np.uint64(state) ^ mix(np.uint64(token * 64 + layer) + np.uint64(mark << 20)))


def logits_from(rows, states):
    """rows: uint64 [layers, tokens] of every paged group in order; states: uint64 of every KDA layer."""
    digest = np.uint64(0)
    for values in rows:
        order = np.arange(len(values), dtype=np.uint64)
        digest = mix(digest ^ np.bitwise_xor.reduce(mix(values ^ mix(order))))
    for state in states:
        digest = mix(digest ^ state)
    words = mix(digest + np.arange(VOCAB, dtype=np.uint64))
    return ((words >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24) * 6 - 3).astype(np.float32)


class Straight:
    """The same model without pages, stores or workers: token ids in, logits out."""

    def __init__(self):
        self.length = 0
        self.states = [np.uint64(0)] * len(KDA)
        self.rows = [np.array([], np.uint64)] * (2 * len(GLOBAL))

    def feed(self, ids, mark):
        positions = np.arange(self.length, self.length + len(ids))
        layers = [layer + 50 * group for group in (0, 1) for layer in GLOBAL]
        self.rows = [
            np.append(rows, row_hash(ids, positions, layer, mark))
            for rows, layer in zip(self.rows, layers, strict=True)
        ]
        for token in ids:
            self.states = [next_state(s, int(token), layer, mark) for s, layer in zip(self.states, KDA, strict=True)]
        self.length += len(ids)
        return logits_from(self.rows, self.states)


def answer(job):
    """All ids that `job` must generate from its prompt on, whatever was forced of them."""
    return _answer(tuple(job.ids[: job.n_prompt].tolist()), job.seed, job.choice, job.sampling)


@lru_cache(maxsize=4096)
def _answer(prompt, seed, choice, sampling):
    straight = Straight()
    logits = straight.feed(prompt, PREFILL)
    job = Job(
        id="",
        ids=np.array(prompt, np.int32),
        n_prompt=len(prompt),
        seed=seed,
        choice=choice,
        sampling=sampling,
        timeout_s=1.0,
    )
    sampler, generated = Sampler(job, VOCAB), []
    while True:
        token = sampler.choose(logits).id
        generated.append(token)
        stopped = len(generated) >= sampling.min_tokens and token in sampling.stop_ids
        if stopped or len(generated) == sampling.max_tokens:
            return tuple(generated)
        sampler.observe(token)
        logits = straight.feed([token], DECODE)


def job_of(name, n_prompt, *, temperature=0.0, max_tokens=6, seed=0):
    """A prompt of random ids; those of one seed are prefixes of each other."""
    ids = np.random.default_rng(seed).integers(0, VOCAB, 400, dtype=np.int32)[:n_prompt]
    sampling = Sampling(temperature=temperature, max_tokens=max_tokens)
    return Job(id=name, ids=ids, n_prompt=n_prompt, seed=17, sampling=sampling, timeout_s=60.0)


def config_of(run_dir, *, device_pages=160, host_pages=64, handoff_bytes=1 << 17, checkpoints="prompt_end", **changes):
    store = StoreConfig(
        device_bytes=device_pages * 128,
        host_bytes=host_pages * 128,
        handoff_bytes=handoff_bytes,
        run_dir=str(run_dir),
        checkpoints=checkpoints,
    )
    return WorkerConfig(**{"block_tokens": 4, "chunk_tokens": 8, "store": store, **changes})


class HashModel:
    """Layers 3 and 6 global, the others KDA; a block of 4 tokens, latent pages of 8."""

    fingerprint = b"hash model"
    dtype = torch.float32
    device = torch.device("cpu")
    shape = HashShape()

    def __init__(self):
        self.layout = make_layout(
            block_tokens=4,
            global_layers=GLOBAL,
            kda_layers=KDA,
            latent_row_bytes=16,
            index_row_bytes=8,
            state_bytes=120,
        )
        self.prefills = []

    def prefill(self, ids, start, pages, pool):
        self.prefills.append((start, start + len(ids)))
        words = pool.bytes.numpy().view(np.uint64)
        self._write_rows(words, pages, ids.numpy(), np.arange(start, start + len(ids)), PREFILL)
        for token in ids.tolist():
            self._advance(words, pages, token, PREFILL)
        return torch.from_numpy(self._logits(words, pages, start + len(ids)))

    def decode(self, ids, positions, pages, pool):
        words, rows = pool.bytes.numpy().view(np.uint64), []
        for token, position, table in zip(ids.tolist(), positions, pages, strict=True):
            self._write_rows(words, table, np.array([token]), np.array([position]), DECODE)
            self._advance(words, table, token, DECODE)
            rows.append(self._logits(words, table, position + 1))
        return torch.from_numpy(np.stack(rows))

    def _write_rows(self, words, pages, ids, positions, mark):
        for g, group in enumerate(self.layout.paged):
            width = group.row_bytes // 8
            for i, layer in enumerate(group.layers):
                page = pages[group.name][i, positions // group.page_tokens]
                offset = positions % group.page_tokens * width
                for word in range(width):
                    words[page, offset + word] = row_hash(ids, positions, layer + 50 * g, mark)

    def _advance(self, words, pages, token, mark):
        for group in self.layout.states:
            for i, layer in enumerate(group.layers):
                page = pages[group.name][i, 0]
                words[page, : group.state_bytes // 8] = next_state(words[page, 0], token, layer, mark)

    def _logits(self, words, pages, n_tokens):
        positions, rows, states = np.arange(n_tokens), [], {}
        for group in self.layout.paged:
            width = group.row_bytes // 8
            for i in range(len(group.layers)):
                page = pages[group.name][i, positions // group.page_tokens]
                offset = positions % group.page_tokens * width
                first, last = words[page, offset], words[page, offset + width - 1]
                rows.append(first + mix(first ^ last) - mix(0))  # equal words: the first
        for group in self.layout.states:
            for i, layer in enumerate(group.layers):
                state = words[pages[group.name][i, 0], : group.state_bytes // 8]
                states[layer] = state[0] + np.bitwise_or.reduce(state ^ state[0])  # equal words: the first
        return logits_from(rows, [states[layer] for layer in sorted(states)])

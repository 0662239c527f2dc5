"""How the next token is chosen from a row of logits: a pure function of (logits, ids so far, sampling, seed, choice).

Order, as in vLLM: logit bias, `min_tokens` (stop ids barred), penalties, temperature, min_p, top_k, top_p, one draw.
Everything after the model's fp32 row is float64 on the host, so a row's choice never depends on its company.

* presence and frequency count generated tokens (ids from `n_prompt` on); repetition counts prompt and generated;
* the noise is one uniform number from a hash of (seed, choice, position), where position is the index that the new
  token will have in the sequence; it goes through the inverse CDF of the filtered distribution, sorted by falling
  probability, equal ones by rising id. So a stream that is resumed anywhere draws what it would have drawn;
* temperature 0 takes the largest logit, the lowest id of equal ones;
* logprobs are of the model's raw logits (log-softmax before bias, penalties and temperature).
"""

import hashlib
import struct

import numpy as np
import numpy.typing as npt

from forebay.workers.job import Job, Sampling, TokenChoice

HEAD = 1024
"""How many of the likeliest tokens are sorted first. Only a draw beyond their mass sorts the whole vocabulary."""

COLDEST = 1e-5
"""Smaller temperatures than this, but for 0, are taken as this one."""

_U64 = (1 << 64) - 1

Row = npt.NDArray[np.float32]
Wide = npt.NDArray[np.float64]


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, a pure function of its arguments."""
    digest = hashlib.blake2b(struct.pack("<QQQ", seed & _U64, choice & _U64, position & _U64), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


class Sampler:
    """Chooses the tokens of one sequence. Keeps the counts that penalties need: `observe` every token that follows."""

    def __init__(self, job: Job, vocab: int) -> None:
        self._sampling, self._seed, self._choice = job.sampling, job.seed, job.choice
        self._length, self._generated = len(job.ids), job.n_forced
        self._counts = _counts(job, vocab) if _penalises_generated(job.sampling) else None
        self._seen = _seen(job, vocab) if job.sampling.repetition_penalty != 1.0 else None

    @property
    def greedy(self) -> bool:
        """True where the choice is the plain argmax of the row, so that a batch may take it at once."""
        s = self._sampling
        barred = bool(s.stop_ids) and self._generated < s.min_tokens
        unchanged = not s.logit_bias and not barred and self._counts is None and self._seen is None
        return s.temperature == 0.0 and unchanged and s.logprobs is None

    def observe(self, token: int) -> None:
        self._length += 1
        self._generated += 1
        if self._counts is not None:
            self._counts[token] += 1
        if self._seen is not None:
            self._seen[token] = True

    def choose(self, logits: Row) -> TokenChoice:
        """logits [vocab] fp32. Changes nothing."""
        scores = self._adjusted(logits)
        if self._sampling.temperature == 0.0:
            token = int(scores.argmax())
        else:
            token = _draw(scores, self._sampling, uniform(self._seed, self._choice, self._length))
        if self._sampling.logprobs is None:
            return TokenChoice(id=token)
        return _with_logprobs(logits, token, self._sampling.logprobs)

    def _adjusted(self, logits: Row) -> Wide:
        s = self._sampling
        scores = logits.astype(np.float64)
        for token, bias in s.logit_bias:
            scores[token] += bias
        if self._generated < s.min_tokens:
            scores[list(s.stop_ids)] = -np.inf
        if self._seen is not None:
            harder = np.where(scores > 0, scores / s.repetition_penalty, scores * s.repetition_penalty)
            scores = np.where(self._seen, harder, scores)
        if self._counts is not None:
            scores -= s.frequency_penalty * self._counts + s.presence_penalty * (self._counts > 0)
        return scores


def choose_all(samplers: list[Sampler], logits: npt.NDArray[np.float32]) -> list[TokenChoice]:
    """One choice a row: logits [sequences, vocab]. Greedy rows cost one argmax for all of them."""
    best = logits.argmax(axis=1)
    assert np.isfinite(logits[np.arange(len(best)), best]).all(), "a row of logits has a largest finite value"
    return [
        TokenChoice(id=int(best[i])) if sampler.greedy else sampler.choose(logits[i])
        for i, sampler in enumerate(samplers)
    ]


def _penalises_generated(sampling: Sampling) -> bool:
    return sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


def _counts(job: Job, vocab: int) -> npt.NDArray[np.int64]:
    return np.bincount(job.ids[job.n_prompt :], minlength=vocab)


def _seen(job: Job, vocab: int) -> npt.NDArray[np.bool_]:
    seen = np.zeros(vocab, np.bool_)
    seen[job.ids] = True
    return seen


def _draw(scores: Wide, sampling: Sampling, noise: float) -> int:
    top = scores.max()
    assert np.isfinite(top), "a row of logits has a largest finite value"
    weights = np.exp((scores - top) / max(sampling.temperature, COLDEST))
    weights[weights < sampling.min_p] = 0.0  # the largest weight is 1
    for size in (min(HEAD, len(weights)), len(weights)):
        token = _inverse(weights, _likeliest(weights, size), sampling, noise)
        if token is not None:
            return token
    raise AssertionError("the whole vocabulary holds every draw")


def _likeliest(scores: Wide, size: int) -> npt.NDArray[np.intp]:
    """Ids of the `size` largest scores and of all that equal the last one, largest first, equal ones by rising id."""
    least = np.partition(scores, len(scores) - size)[len(scores) - size]
    ids = np.flatnonzero(scores >= least)
    return ids[np.argsort(-scores[ids], kind="stable")]


def _inverse(every: Wide, ids: npt.NDArray[np.intp], sampling: Sampling, noise: float) -> int | None:
    """The drawn id; None where a filter or the draw reaches beyond `ids` (the likeliest of `every`, sorted)."""
    weights, mass, complete = every[ids], every.sum(), len(ids) == len(every)
    if sampling.top_k:
        if sampling.top_k > len(ids) and not complete:
            return None
        weights, complete = weights[: sampling.top_k], True
        mass = weights.sum()
    running = np.cumsum(weights)
    if sampling.top_p < 1.0:
        kept = int(np.searchsorted(running, sampling.top_p * mass)) + 1
        if kept > len(running) and not complete:
            return None
        running, complete = running[:kept], True
        mass = running[-1]
    place = int(np.searchsorted(running, noise * mass, side="right"))
    if place >= len(running) and not complete:
        return None
    # Rounding of the sum may put a draw just behind the last weight: that is the last token of weight.
    return int(ids[place] if place < len(running) else ids[np.flatnonzero(weights[: len(running)])[-1]])


def _with_logprobs(logits: Row, token: int, alternatives: int) -> TokenChoice:
    wide = logits.astype(np.float64)
    top = wide.max()
    logprobs = wide - (top + np.log(np.exp(wide - top).sum()))
    best = _likeliest(wide, min(alternatives, len(wide)))[:alternatives] if alternatives else ()
    top_ids = tuple((int(i), float(logprobs[i])) for i in best)
    return TokenChoice(id=token, logprob=float(logprobs[token]), top=top_ids)

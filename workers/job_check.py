"""Is a job one that this model can run at all? Refused before it takes anything, with the field's name."""

import math
from collections.abc import Iterator

from forebay.workers.job import Job, Sampling

LARGEST = 1e6
"""Bound of every bias and penalty, far beyond any use, so that no sum of them loses a logit."""


def fault(job: Job, vocab: int, context_tokens: int) -> str | None:
    """What is wrong with `job`, beginning with the field's name; None if nothing is."""
    return next(_faults(job, vocab, context_tokens), None)


def _faults(job: Job, vocab: int, context_tokens: int) -> Iterator[str]:
    if not 1 <= job.n_prompt <= len(job.ids):
        yield f"n_prompt: {job.n_prompt} of {len(job.ids)} ids; a prompt has at least one token"
    elif job.ids.min() < 0 or job.ids.max() >= vocab:
        yield f"ids: every id lies in 0..{vocab - 1}"
    if job.n_prompt + job.sampling.max_tokens > context_tokens:
        wanted = f"{job.n_prompt} prompt tokens and max_tokens {job.sampling.max_tokens}"
        yield f"n_prompt: {wanted} exceed the context of {context_tokens}"
    if 1 <= job.sampling.max_tokens < job.n_forced:
        yield f"ids: {job.n_forced} generated tokens exceed max_tokens {job.sampling.max_tokens}"
    if not 0 < job.timeout_s < math.inf:
        yield f"timeout_s: {job.timeout_s} is not a positive duration"
    yield from _sampling_faults(job.sampling, vocab)


def _sampling_faults(s: Sampling, vocab: int) -> Iterator[str]:
    if s.max_tokens < 1:
        yield f"max_tokens: {s.max_tokens} is less than 1"
    if not 0 <= s.temperature < math.inf:
        yield f"temperature: {s.temperature} is not a number from 0 on"
    if not 0 <= s.top_p <= 1:
        yield f"top_p: {s.top_p} lies outside 0..1"
    if not 0 <= s.min_p <= 1:
        yield f"min_p: {s.min_p} lies outside 0..1"
    if s.top_k < 0:
        yield f"top_k: {s.top_k} is negative (0: all tokens)"
    if not 0 < s.repetition_penalty <= LARGEST:
        yield f"repetition_penalty: {s.repetition_penalty} is not a positive number up to {LARGEST:g}"
    for name, value in (("presence_penalty", s.presence_penalty), ("frequency_penalty", s.frequency_penalty)):
        if not abs(value) <= LARGEST:
            yield f"{name}: {value} is not a number within ±{LARGEST:g}"
    if not all(0 <= token < vocab and abs(bias) <= LARGEST for token, bias in s.logit_bias):
        yield f"logit_bias: ids lie in 0..{vocab - 1}, biases within ±{LARGEST:g}"
    if s.logprobs is not None and s.logprobs < 0:
        yield f"logprobs: {s.logprobs} is negative"
    if not all(0 <= token < vocab for token in s.stop_ids):
        yield f"stop_ids: every id lies in 0..{vocab - 1}"
    if s.min_tokens > 0 and len(set(s.stop_ids)) >= vocab:
        yield "min_tokens: every id is a stop id"

"""Sampling against a slow twin that filters and draws by loops over the whole sorted vocabulary."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from forebay.workers import sampling as fast
from forebay.workers.job import Job, Sampling

CLOSE = 1e-9


def job_of(ids, n_prompt, sampling, seed=7, choice=0):
    return Job(
        id="j",
        ids=np.array(ids, np.int32),
        n_prompt=n_prompt,
        seed=seed,
        choice=choice,
        sampling=sampling,
        timeout_s=1.0,
    )


def slow_scores(logits, ids, n_prompt, s):
    scores = [float(x) for x in logits]
    for token, bias in s.logit_bias:
        scores[token] += bias
    generated = list(ids[n_prompt:])
    if len(generated) < s.min_tokens:
        for token in s.stop_ids:
            scores[token] = -math.inf
    for token in range(len(scores)):
        if token in ids:
            scores[token] *= 1 / s.repetition_penalty if scores[token] > 0 else s.repetition_penalty
        if token in generated:
            scores[token] -= s.presence_penalty + s.frequency_penalty * generated.count(token)
    return scores


def slow_choice(logits, ids, n_prompt, s, seed, choice):
    """(token, how near the draw or a filter stood to another answer)."""
    scores = slow_scores(logits, ids, n_prompt, s)
    best = max(scores)
    if s.temperature == 0:
        nearest = min((best - x for x in scores if x != best), default=1.0)
        return scores.index(best), nearest
    weights = [math.exp((x - best) / s.temperature) for x in scores]
    margin = min((abs(w - s.min_p) for w in weights if s.min_p and w != 1.0), default=1.0)
    order = sorted((i for i in range(len(weights)) if weights[i] >= s.min_p), key=lambda i: (-weights[i], i))
    gaps = (a - b for i, a in enumerate(weights) for b in weights[:i] if a != b)
    margin = min([margin, *(abs(gap) for gap in gaps)])
    order = order[: s.top_k] if s.top_k else order
    mass = sum(weights[i] for i in order)
    if s.top_p < 1:
        kept, running = [], 0.0
        for i in order:
            kept.append(i)
            running += weights[i] / mass
            margin = min(margin, abs(running - s.top_p))
            if running >= s.top_p:
                break
        order = kept
    mass, running, u = sum(weights[i] for i in order), 0.0, fast.uniform(seed, choice, len(ids))
    for i in order:
        running += weights[i] / mass
        margin = min(margin, abs(running - u))
        if running > u:
            return i, margin
    return order[-1], 0.0


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.0, 0.2, 0.7, 0.95, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 100]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.7, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.5, 0.8]),
    logit_bias=st.lists(st.tuples(st.integers(0, 7), st.sampled_from([-100.0, 1.25, 4.0])), max_size=2).map(tuple),
    max_tokens=st.just(9),
    min_tokens=st.integers(0, 3),
    stop_ids=st.sampled_from([(), (3,), (1, 5)]),
)
rows = st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 1.1, 2.3]), min_size=8, max_size=12)


@settings(max_examples=400, deadline=None)
@given(
    rows, st.lists(st.integers(0, 7), min_size=1, max_size=8), st.integers(0, 3), samplings, st.integers(), st.data()
)
def test_equals_the_slow_twin_and_observing_equals_starting_anew(row, ids, choice, s, seed, data):
    n_prompt = data.draw(st.integers(1, len(ids)))
    logits = np.array(row, np.float32)
    expected, margin = slow_choice(logits, ids, n_prompt, s, seed, choice)
    assume(margin > CLOSE)
    whole = fast.Sampler(job_of(ids, n_prompt, s, seed, choice), len(row))
    stepped = fast.Sampler(job_of(ids[:n_prompt], n_prompt, s, seed, choice), len(row))
    for token in ids[n_prompt:]:
        stepped.observe(token)
    assert whole.choose(logits).id == stepped.choose(logits).id == expected


@pytest.mark.parametrize("top_k", [0, 3, 300])
@pytest.mark.parametrize("top_p", [0.999, 1.0])
def test_a_sorted_head_changes_no_draw(monkeypatch, top_k, top_p):
    rng = np.random.default_rng(3)
    s = Sampling(temperature=1.5, top_k=top_k, top_p=top_p, max_tokens=1)
    logits = np.round(rng.normal(size=(200, 500)) * 2, 1).astype(np.float32)

    def drawn():
        return [fast.Sampler(job_of([1], 1, s, seed), 500).choose(logits[seed]).id for seed in range(200)]

    whole = drawn()
    monkeypatch.setattr(fast, "HEAD", 16)
    assert drawn() == whole
    assert len(set(whole)) > 20


def test_draws_follow_the_distribution():
    s = Sampling(temperature=1.0, max_tokens=1)
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    logits = np.log(probabilities).astype(np.float32)
    counts = np.zeros(4)
    for seed in range(4000):
        counts[fast.Sampler(job_of([0], 1, s, seed), 4).choose(logits).id] += 1
    assert np.abs(counts / 4000 - probabilities).max() < 0.03


def test_noise_depends_on_seed_choice_and_position_alone():
    values = {
        (s, c, p): fast.uniform(s, c, p) for s in (-1, 0, 1, 2**63, 2**64 + 5) for c in (0, 1) for p in (0, 1, 99)
    }
    assert len(set(values.values())) == len(values)
    assert all(0 <= v < 1 for v in values.values())
    assert fast.uniform(5, 0, 3) == fast.uniform(5, 0, 3)


def test_temperature_zero_takes_the_lowest_id_of_equals():
    s = Sampling(temperature=0.0, max_tokens=1)
    logits = np.array([0.0, 2.0, 2.0, 1.0], np.float32)
    assert fast.Sampler(job_of([0], 1, s), 4).choose(logits).id == 1
    biased = replace(s, logit_bias=((1, -1.0),))
    assert fast.Sampler(job_of([0], 1, biased), 4).choose(logits).id == 2


def test_logprobs_are_of_the_raw_row():
    s = Sampling(temperature=0.5, logit_bias=((0, 100.0),), logprobs=2, max_tokens=1)
    logits = np.array([0.0, 2.0, 2.0, 1.0], np.float32)
    chosen = fast.Sampler(job_of([0], 1, s), 4).choose(logits)
    expected = logits - math.log(np.exp(logits.astype(np.float64)).sum())
    assert chosen.id == 0
    assert chosen.logprob == pytest.approx(expected[0])
    assert [i for i, _ in chosen.top] == [1, 2]
    assert [x for _, x in chosen.top] == pytest.approx(expected[1:3])
    alone = fast.Sampler(job_of([0], 1, replace(s, logprobs=0)), 4).choose(logits)
    assert (alone.logprob, alone.top) == (chosen.logprob, ())


def test_a_batch_chooses_what_each_row_chooses_alone():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, 50)).astype(np.float32)
    kinds = [Sampling(temperature=t, max_tokens=1, logprobs=p) for t in (0.0, 1.0, 0.7) for p in (None, 3)]
    samplers = [fast.Sampler(job_of([1, 2], 1, s, seed=i), 50) for i, s in enumerate(kinds)]
    assert fast.choose_all(samplers, logits) == [s.choose(row) for s, row in zip(samplers, logits, strict=True)]


def test_a_row_without_numbers_is_a_broken_invariant():
    greedy = fast.Sampler(job_of([1], 1, Sampling(temperature=0.0, max_tokens=1)), 3)
    drawn = fast.Sampler(job_of([1], 1, Sampling(max_tokens=1)), 3)
    bad = np.array([0.0, np.nan, 1.0], np.float32)
    for sampler in (greedy, drawn):
        with pytest.raises(AssertionError, match="finite"):
            fast.choose_all([sampler], bad[None])

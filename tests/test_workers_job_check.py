"""Every bad field is refused by its name; the good job and its limits pass."""

from dataclasses import replace

import numpy as np
import pytest

from forebay.workers.job import Job, Sampling
from forebay.workers.job_check import fault

GOOD = Job(
    id="j", ids=np.array([1, 2, 3, 9], np.int32), n_prompt=3, seed=0, sampling=Sampling(max_tokens=5), timeout_s=1
)


def sampled(**changes):
    return replace(GOOD, sampling=replace(GOOD.sampling, **changes))


@pytest.mark.parametrize(
    "job",
    [
        GOOD,
        replace(GOOD, n_prompt=4),
        sampled(max_tokens=1),
        sampled(max_tokens=97),
        sampled(temperature=0.0, top_p=0.0, min_p=1.0, stop_ids=(0, 9), logit_bias=((9, -100.0),), min_tokens=3),
    ],
)
def test_a_good_job_passes(job):
    assert fault(job, 10, 100) is None


@pytest.mark.parametrize(
    ("field", "job"),
    [
        ("n_prompt", replace(GOOD, n_prompt=0)),
        ("n_prompt", replace(GOOD, n_prompt=5)),
        ("n_prompt", replace(GOOD, ids=np.array([], np.int32))),
        ("n_prompt", sampled(max_tokens=98)),
        ("ids", replace(GOOD, ids=np.array([1, 2, 10, 1], np.int32))),
        ("ids", replace(GOOD, ids=np.array([1, -1, 3, 1], np.int32))),
        ("ids", replace(GOOD, n_prompt=1, sampling=Sampling(max_tokens=2))),
        ("timeout_s", replace(GOOD, timeout_s=0.0)),
        ("timeout_s", replace(GOOD, timeout_s=float("nan"))),
        ("max_tokens", sampled(max_tokens=0)),
        ("temperature", sampled(temperature=-0.1)),
        ("temperature", sampled(temperature=float("nan"))),
        ("top_p", sampled(top_p=1.1)),
        ("min_p", sampled(min_p=-0.1)),
        ("top_k", sampled(top_k=-1)),
        ("repetition_penalty", sampled(repetition_penalty=0.0)),
        ("presence_penalty", sampled(presence_penalty=float("inf"))),
        ("frequency_penalty", sampled(frequency_penalty=float("nan"))),
        ("logit_bias", sampled(logit_bias=((10, 1.0),))),
        ("logit_bias", sampled(logit_bias=((1, float("-inf")),))),
        ("logprobs", sampled(logprobs=-1)),
        ("stop_ids", sampled(stop_ids=(-1,))),
        ("min_tokens", sampled(min_tokens=1, stop_ids=tuple(range(10)))),
    ],
)
def test_a_bad_field_is_named(field, job):
    message = fault(job, 10, 100)
    assert message is not None
    assert message.startswith(f"{field}: ")

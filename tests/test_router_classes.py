"""Classes are chosen by the first rule that matches; keys are checked only where there are any."""

import pytest

from forebay.router.classes import classify, key_name
from forebay.router.config import DEFAULT_RULES, ApiKey, ClassRule
from forebay.router.outcome import ApiError

KEYS = (ApiKey(name="team", secret="s3cret"), ApiKey(name="nightly", secret="other"))


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer wrong", "Basic s3cret", "s3cret", "Bearer s3cre\u0301t"]
)
def test_a_missing_or_wrong_key_is_401(header):
    with pytest.raises(ApiError) as caught:
        key_name(header, KEYS)
    assert (caught.value.status, caught.value.code, caught.value.outcome) == (401, "invalid_api_key", "unauthorized")
    assert "s3cret" not in caught.value.message


def test_a_right_key_is_named():
    assert key_name("Bearer s3cret", KEYS) == "team"
    assert key_name("bearer  other ", KEYS) == "nightly"


def test_without_keys_a_token_names_itself():
    assert key_name("Bearer batch", ()) == "batch"
    assert key_name(None, ()) == ""


RULES = (
    ClassRule(class_name="batch", keys=("nightly",)),
    ClassRule(class_name="huge", uncached_tokens_min=100_000),
    ClassRule(class_name="small", prompt_tokens_max=2000, uncached_tokens_max=1000),
    ClassRule(class_name="agent"),
)


@pytest.mark.parametrize(
    ("key", "prompt", "uncached", "expected"),
    [
        ("nightly", 10, 10, "batch"),
        ("nightly", 10**6, 10**6, "batch"),
        ("team", 10**6, 100_000, "huge"),
        ("team", 10**6, 99_999, "agent"),
        ("team", 2000, 1000, "small"),
        ("team", 2001, 1000, "agent"),
        ("team", 2000, 1001, "agent"),
    ],
)
def test_first_match_wins(key, prompt, uncached, expected):
    assert classify(RULES, key, prompt, uncached) == expected


def test_default_rules_keep_long_and_short_apart():
    assert classify(DEFAULT_RULES, "", 400_000, 3_000) == "interactive"
    assert classify(DEFAULT_RULES, "", 400_000, 400_000) == "agent"
    assert classify(DEFAULT_RULES, "batch", 10, 10) == "batch"

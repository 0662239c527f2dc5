"""Who asks, and in which class: keys are data, and so are the rules over key, prompt length and uncached tokens."""

import hmac
from collections.abc import Sequence

from forebay.router.config import ApiKey, ClassRule
from forebay.router.outcome import ApiError

ANONYMOUS = ""


def key_name(authorization: str | None, keys: Sequence[ApiKey]) -> str:
    """The name of the caller's key. With no keys configured everybody is let in, and a bearer token names itself."""
    scheme, _, token = (authorization or "").partition(" ")
    token = token.strip() if scheme.lower() == "bearer" else ""
    if not keys:
        return token or ANONYMOUS
    # Every key is compared, so the time taken tells nothing of which came close.
    found = [key.name for key in keys if hmac.compare_digest(key.secret.encode(), token.encode())]
    if not found:
        reason = "Incorrect API key provided." if token else "No API key provided: send 'Authorization: Bearer KEY'."
        raise ApiError(401, reason, outcome="unauthorized", code="invalid_api_key")
    return found[0]


def classify(rules: Sequence[ClassRule], key: str, prompt_tokens: int, uncached_tokens: int) -> str:
    """The class of the first rule that matches; the configuration ends with one that always does."""
    for rule in rules:
        if _matches(rule, key, prompt_tokens, uncached_tokens):
            return rule.class_name
    raise AssertionError("the last rule matches everything")


def _matches(rule: ClassRule, key: str, prompt_tokens: int, uncached_tokens: int) -> bool:
    return (
        (not rule.keys or key in rule.keys)
        and _within(prompt_tokens, rule.prompt_tokens_min, rule.prompt_tokens_max)
        and _within(uncached_tokens, rule.uncached_tokens_min, rule.uncached_tokens_max)
    )


def _within(value: int, low: int, high: int | None) -> bool:
    return low <= value and (high is None or value <= high)

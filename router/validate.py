"""Bytes to a checked body: every refusal is a 400 (or 404) that names the field and the limit, never a 5xx.

The same for streaming or not, since nothing has been sent yet. Unknown top-level fields are ignored, and counted in
the log; known ones that are not served are refused.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from forebay.router.bodies import Body, ChatBody, CompletionBody
from forebay.router.config import ModelConfig
from forebay.router.outcome import ApiError, invalid, unsupported
from forebay.router.wire import WireSampling

STOPS_MAX = 16
STOP_CHARS_MAX = 1024
TOP_LOGPROBS_MAX = 20

# (lowest, highest) of each number, both allowed unless the field is in _ABOVE.
_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0, 10),
    "top_k": (-1, 2**31 - 1),
    "n": (1, math.inf),
    "max_tokens": (1, math.inf),
    "max_completion_tokens": (1, math.inf),
    "min_tokens": (0, math.inf),
    "seed": (-(2**63), 2**64 - 1),
}
_ABOVE = frozenset(("top_p", "repetition_penalty"))
_PLACE = re.compile(r" - at `(?:key in )?\$\.?(.*)`$")

SomeBody = TypeVar("SomeBody", ChatBody, CompletionBody)


def read_body(raw: bytes, kind: type[SomeBody], unserved: Mapping[str, tuple[Any, ...]]) -> tuple[SomeBody, list[str]]:
    """The typed body, and the names of the fields that it has beyond what is known."""
    fields = _decode(raw)
    for name, harmless in unserved.items():
        value = fields.get(name)
        if value is not None and value not in harmless:
            raise unsupported(name, f"the value {_shown(value)}" if harmless else "this field")
    try:
        body = msgspec.convert(fields, kind, strict=True)
    except msgspec.ValidationError as error:
        raise _named(error) from error
    known = {*unserved, *(each.name for each in msgspec.structs.fields(kind))}
    return body, sorted(name for name in fields if name not in known)


def check_numbers(body: Body) -> None:
    """Every number lies in its range."""
    for name, (low, high) in _RANGES.items():
        value = getattr(body, name, None)
        if value is None:
            continue
        if not low <= value <= high or (name in _ABOVE and value == low) or not math.isfinite(value):
            raise invalid(name, f"{name}: {value} is not {_range(name, low, high)}.")


def stops_of(body: Body) -> tuple[str, ...]:
    """The stop strings, none of them empty."""
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stops) > STOPS_MAX:
        raise invalid("stop", f"stop: {len(stops)} strings, at most {STOPS_MAX} are allowed.")
    if any(not stop or len(stop) > STOP_CHARS_MAX for stop in stops):
        raise invalid("stop", f"stop: every string has 1 to {STOP_CHARS_MAX} characters.")
    return stops


def chat_logprobs(body: ChatBody) -> int | None:
    """How many alternatives to report: None for no log probabilities at all."""
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise invalid("top_logprobs", "top_logprobs: needs logprobs to be true.")
        _check_top("top_logprobs", body.top_logprobs)
    return (body.top_logprobs or 0) if body.logprobs else None


def completion_logprobs(body: CompletionBody) -> int | None:
    if body.logprobs is not None:
        _check_top("logprobs", body.logprobs)
    return body.logprobs


def sampling(
    body: Body, model: ModelConfig, *, max_tokens: int, logprobs: int | None, eos_ids: frozenset[int], vocab: int
) -> WireSampling:
    """The wire's sampling of a body whose numbers were checked."""
    if (body.min_tokens or 0) > max_tokens:
        raise invalid("min_tokens", f"min_tokens: {body.min_tokens} is more than the {max_tokens} tokens to generate.")
    stop_ids = set() if body.ignore_eos else set(eos_ids)
    return WireSampling(
        temperature=_or(body.temperature, model.temperature),
        top_p=_or(body.top_p, model.top_p),
        top_k=max(0, body.top_k or 0),
        min_p=_or(body.min_p, 0.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        logit_bias=_logit_bias(body, vocab),
        logprobs=logprobs,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        stop_ids=sorted(stop_ids.union(check_ids("stop_token_ids", body.stop_token_ids or [], vocab))),
    )


def check_ids(field: str, ids: list[Any], vocab: int) -> list[int]:
    """Token ids of the vocabulary."""
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab:
            raise invalid(field, f"{field}: {_shown(token_id)} is not a token id: an integer from 0 to {vocab - 1}.")
    return ids


def output_tokens(asked: int | None, field: str, prompt_tokens: int, context_tokens: int, default: int) -> int:
    """How many tokens may be generated: what was asked for, or the default, within the context."""
    room = context_tokens - prompt_tokens
    if asked is None:
        return min(default, room)
    if asked > room:
        text = (
            f"This model's maximum context length is {context_tokens} tokens. However, you requested "
            f"{prompt_tokens + asked} tokens ({prompt_tokens} in the prompt, {asked} in {field})."
        )
        raise invalid(field, text, "context_length_exceeded")
    return asked


def check_context(field: str, prompt_tokens: int, context_tokens: int) -> None:
    """There is a prompt, and room for at least one token after it."""
    if prompt_tokens < 1:
        raise invalid(field, f"{field}: the prompt is empty.")
    if prompt_tokens >= context_tokens:
        text = (
            f"This model's maximum context length is {context_tokens} tokens. However, your {field} resulted in "
            f"{prompt_tokens} tokens; at most {context_tokens - 1} leave room for an answer."
        )
        raise invalid(field, text, "context_length_exceeded")


def _decode(raw: bytes) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable(raw, error) from error
    if not isinstance(fields, dict):
        raise invalid(None, "The body must be a JSON object.")
    return fields


def _unreadable(raw: bytes, error: Exception) -> ApiError:
    """Numbers that JSON does not have (NaN, Infinity) are named; else it is said where the text stops being JSON."""
    try:
        field = _not_finite(json.loads(raw), "")
    except (ValueError, RecursionError):
        field = None
    if field:
        return invalid(field, f"{field}: must be a finite number.")
    what = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
    return invalid(None, f"The body could not be parsed as JSON: {what}.", "invalid_json")


def _not_finite(value: object, path: str) -> str | None:
    """The path of the first number that is not finite."""
    if isinstance(value, float):
        return None if math.isfinite(value) else path
    pairs: list[tuple[str, object]] = []
    if isinstance(value, dict):
        pairs = [(f"{path}.{key}" if path else str(key), each) for key, each in value.items()]
    elif isinstance(value, list):
        pairs = [(f"{path}[{i}]", each) for i, each in enumerate(value)]
    return next((found for key, each in pairs if (found := _not_finite(each, key))), None)


def _named(error: msgspec.ValidationError) -> ApiError:
    """The field's path out of the library's message, which ends with it."""
    text = str(error)
    if found := _PLACE.search(text):
        field = found.group(1) or None
        return invalid(field, f"{field}: {text[: found.start()]}." if field else text)
    missing = re.search(r"missing required field `(\w+)`", text)
    return invalid(missing.group(1) if missing else None, f"{text}.")


def _logit_bias(body: Body, vocab: int) -> list[tuple[int, float]]:
    biases = []
    for key, bias in (body.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab):
            raise invalid("logit_bias", f"logit_bias: {_shown(key)} is not a token id from 0 to {vocab - 1}.")
        if not -100 <= bias <= 100:
            raise invalid("logit_bias", f"logit_bias: {bias} is not a number from -100 to 100.")
        biases.append((int(key), bias))
    return sorted(biases)


def _check_top(field: str, value: int) -> None:
    if not 0 <= value <= TOP_LOGPROBS_MAX:
        raise invalid(field, f"{field}: {value} is not a number from 0 to {TOP_LOGPROBS_MAX}.")


def _range(name: str, low: float, high: float) -> str:
    if high == math.inf:
        return f"a number of at least {low:g}"
    return f"a number above {low:g} and up to {high:g}" if name in _ABOVE else f"a number from {low:g} to {high:g}"


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _shown(value: object) -> str:
    """A value in an error: short, whatever it is."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

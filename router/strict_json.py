"""JSON text that came from a model or a client: parsed without ever raising."""

import json
import math


class _NotJson:
    """What `parse_json` returns for text that is not JSON: None is a JSON value."""


NOT_JSON = _NotJson()


def parse_json(text: str) -> object:
    """The value of strict JSON (no NaN, no number beyond a float, no endless nesting), or NOT_JSON."""
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError):
        return NOT_JSON


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{digits} is beyond a float")
    return value

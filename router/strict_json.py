"""JSON text that came from a model or a client: parsed without ever raising."""

import json


class _NotJson:
    """What `parse_json` returns for text that is not JSON: None is a JSON value."""


NOT_JSON = _NotJson()


def parse_json(text: str) -> object:
    """The value of strict JSON (no NaN), or NOT_JSON, which text nested too deeply or with endless digits also is."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return NOT_JSON


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")

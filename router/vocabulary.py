"""What the readers of tokenizer files have in common: the vocabulary that they make, and the error of a bad file."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class TokenizerError(Exception):
    """A folder whose tokenizer cannot be read; the message names the file and what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """`ordinary`: bytes by id of every token that text may become. `specials`: ids by name, disjoint from those.

    `encode_ordinary` gives ids of `ordinary` alone, whatever the text says.
    """

    ordinary: Mapping[int, bytes]
    specials: Mapping[str, int]
    encode_ordinary: Callable[[str], list[int]]


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an absent file is an empty object."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path}: is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: is not a JSON object")
    return value

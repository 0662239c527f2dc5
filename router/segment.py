"""Segments: what rendered text and streamed tokens are made of. A special token by name, or a run of plain text.

Specials come only from a renderer or from the model's own token ids, never out of anybody's text. A segment is a hard
boundary for the tokenizer, so each one is tokenised alone, and its ids can be kept and used again.
"""

import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Special:
    """A special token by its name, such as `<|open|>`."""

    name: str


@dataclass(frozen=True, slots=True)
class Text:
    """Text that is tokenised with special tokens disallowed."""

    text: str


Segment = Special | Text


class Encoder(Protocol):
    """The part of a tokenizer that `encode` needs."""

    def encode_text(self, text: str) -> list[int]: ...
    def special_id(self, name: str) -> int: ...


class EncodeCache:
    """Ids by segment text, least recently used out first, bounded by the bytes of texts and ids it holds.

    Bound to one tokenizer. May be shared by threads.
    """

    def __init__(self, capacity_bytes: int) -> None:
        assert capacity_bytes >= 0
        self.capacity_bytes = capacity_bytes
        self.held_bytes = 0
        self._ids: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, text: str) -> "array[int] | None":
        with self._lock:
            ids = self._ids.get(text)
            if ids is not None:
                self._ids.move_to_end(text)
            return ids

    def put(self, text: str, ids: "array[int]") -> None:
        with self._lock:
            if text in self._ids or _entry_bytes(text, ids) > self.capacity_bytes:
                return
            self._ids[text] = ids
            self.held_bytes += _entry_bytes(text, ids)
            while self.held_bytes > self.capacity_bytes:
                self.held_bytes -= _entry_bytes(*self._ids.popitem(last=False))


def _entry_bytes(text: str, ids: "array[int]") -> int:
    return sys.getsizeof(text) + sys.getsizeof(ids)


def encode(segments: Iterable[Segment], tokenizer: Encoder, cache: EncodeCache) -> list[int]:
    """Token ids of `segments`; always those of tokenising every segment anew."""
    ids: list[int] = []
    for segment in segments:
        match segment:
            case Special(name):
                ids.append(tokenizer.special_id(name))
            case Text(text):
                known = cache.get(text)
                if known is None:
                    known = array("i", tokenizer.encode_text(text))
                    cache.put(text, known)
                ids.extend(known)
    return ids

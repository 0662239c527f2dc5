"""Token ids back to segments, as they stream."""

import codecs
from collections.abc import Iterable
from typing import Protocol

from forebay.router.segment import Segment, Special, Text


class Decoder(Protocol):
    """The part of a tokenizer that a Detokenizer needs."""

    def name_of(self, token_id: int) -> str | None: ...
    def token_bytes(self, token_id: int) -> bytes: ...


class Detokenizer:
    """Incremental, one for each choice. A character that is split over tokens waits until it is whole; bytes become
    U+FFFD only when nothing that follows could make them a character, which a special token or the end also decides."""

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Iterable[int]) -> list[Segment]:
        """Segments that the ids make complete. Texts are never empty."""
        segments: list[Segment] = []
        for token_id in ids:
            name = self._tokenizer.name_of(token_id)
            if name is None:
                segments += _text(self._utf8.decode(self._tokenizer.token_bytes(token_id)))
            else:
                segments += [*self.finish(), Special(name)]
        return segments

    def finish(self) -> list[Segment]:
        """What is left of a character that was never completed."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return _text(text)


def _text(text: str) -> list[Segment]:
    return [Text(text)] if text else []

"""The detokeniser against decoding all bytes at once, for any bytes and any tokens."""

from hypothesis import given
from hypothesis import strategies as st

from forebay.router.detokenize import Detokenizer
from forebay.router.segment import Segment, Special, Text


class Bytes:
    """Token i is the byte i; 256 is a special token."""

    def name_of(self, token_id: int) -> str | None:
        return "<|sep|>" if token_id == 256 else None

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


def text_of(segments: list[Segment]) -> str:
    return "".join(segment.text if isinstance(segment, Text) else segment.name for segment in segments)


def stream(ids: list[int]) -> str:
    detokenizer = Detokenizer(Bytes())
    segments = [segment for token_id in ids for segment in detokenizer.feed([token_id])]
    segments += detokenizer.finish()
    assert Text("") not in segments
    return text_of(segments)


def whole(ids: list[int]) -> str:
    """Slow twin: bytes between special tokens, decoded in one go."""
    runs: list[list[int]] = [[]]
    for token_id in ids:
        if token_id == 256:
            runs.append([])
        else:
            runs[-1].append(token_id)
    return "<|sep|>".join(bytes(run).decode(errors="replace") for run in runs)


@given(st.lists(st.integers(0, 256)))
def test_any_ids(ids: list[int]) -> None:
    assert stream(ids) == whole(ids)


@given(st.lists(st.sampled_from([*"é漢🙂👩‍👩‍👧".encode(), 0x41, 0xF4, 0x8F, 0xED, 0xA0, 0xC0, 0x80, 256])))
def test_ids_around_the_edges_of_utf8(ids: list[int]) -> None:
    assert stream(ids) == whole(ids)


@given(st.text())
def test_valid_text_is_never_shown_as_a_replacement(text: str) -> None:
    detokenizer = Detokenizer(Bytes())
    shown = ""
    for byte in text.encode():
        shown += text_of(detokenizer.feed([byte]))
        assert text.startswith(shown)
    assert shown == text
    assert detokenizer.finish() == []


def test_bytes_are_replaced_as_soon_as_they_can_no_longer_become_valid() -> None:
    detokenizer = Detokenizer(Bytes())
    assert detokenizer.feed([0xE6, 0xBC]) == []
    assert detokenizer.feed([0x41]) == [Text("\ufffdA")]
    assert detokenizer.feed([0xC0]) == [Text("\ufffd")]
    assert detokenizer.feed([0xE6, 256]) == [Text("\ufffd"), Special("<|sep|>")]
    assert detokenizer.feed([0xF0]) == []
    assert detokenizer.finish() == [Text("\ufffd")]

"""K3's message markup, in one table that the renderer writes from and the parser reads by.

    <|open|>NAME key="value"<|sep|> ... <|close|>NAME<|sep|>      an element
    <|end_of_msg|>                                               after each message

The four markers are special tokens; names, attributes and values are plain text. In attribute values `&` and `"` are
escaped. The parts of a tag are tokenised each alone, as the released renderer does: name, ` key`, `="`, value, `"`.
"""

import re
from collections.abc import Iterable

from forebay.router.segment import Segment, Special, Text

OPEN, CLOSE, SEP, END_OF_MESSAGE = (
    Special("<|open|>"),
    Special("<|close|>"),
    Special("<|sep|>"),
    Special("<|end_of_msg|>"),
)
MARKERS = frozenset({OPEN.name, CLOSE.name, SEP.name, END_OF_MESSAGE.name})

ROOT = ""
PARENT = {
    "message": ROOT,
    "think": "message",
    "response": "message",
    "tools": "message",
    "call": "tools",
    "argument": "call",
    "json": "call",
}


def path(element: str) -> tuple[str, ...]:
    """`element` and all it stands in, innermost first; the root, which holds messages, is last."""
    return (element, *path(PARENT[element])) if element else (ROOT,)


def open_tag(element: str, attributes: Iterable[tuple[str, str]] = ()) -> list[Segment]:
    segments: list[Segment] = [OPEN, Text(element)]
    for key, value in attributes:
        segments += [Text(f" {key}"), Text('="'), *text(_escape(value)), Text('"')]
    return [*segments, SEP]


def close_tag(element: str) -> list[Segment]:
    return [CLOSE, Text(element), SEP]


def text(content: str) -> list[Segment]:
    """A text segment, unless there is no text."""
    return [Text(content)] if content else []


_ATTRIBUTE = re.compile(r'\s+([^\s="]+)="([^"]*)"')
_TAG = re.compile(r'\s*([^\s="]+)((?:\s+[^\s="]+="[^"]*")*)\s*')


def read_tag(header: str) -> tuple[str, dict[str, str]] | None:
    """Element and attributes of the text between a marker and its `<|sep|>`, or None where that is no known tag."""
    tag = _TAG.fullmatch(header)
    if tag is None or tag[1] not in PARENT:
        return None
    return tag[1], {key: _unescape(value) for key, value in _ATTRIBUTE.findall(tag[2])}


def is_complete(element: str, attributes: dict[str, str]) -> bool:
    """Whether an opening tag has what its element cannot do without: a call its tool, an argument its key."""
    return bool(attributes.get("tool")) if element == "call" else element != "argument" or "key" in attributes


def _escape(value: str) -> str:
    return value.replace("&", "&amp;").replace('"', "&quot;")


def _unescape(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")

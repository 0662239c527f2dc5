"""The chat format of a model: how messages become segments and how a stream becomes an answer.

Chosen by the names of the tokenizer's special tokens, since those are what a format is written with.
"""

from collections.abc import Callable
from dataclasses import dataclass

from forebay.router import chat_k2, chat_k3
from forebay.router.answer import NewParser
from forebay.router.parse_k2 import StreamParserK2
from forebay.router.parse_k3 import StreamParserK3
from forebay.router.segment import Segment
from forebay.router.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """`render(messages, tools=None, tool_choice="auto", thinking=False, effort=None)`: see chat_k3.render.

    `new_parser(thinking)` makes the parser of one choice, to be fed what a Detokenizer gives. `thinks`: whether the
    format has a thinking mode at all.
    """

    name: str
    thinks: bool
    render: Callable[..., list[Segment]]
    new_parser: NewParser


K3 = ChatFormat("k3", True, chat_k3.render, StreamParserK3)
K2 = ChatFormat("k2", False, chat_k2.render, StreamParserK2)


def chat_format(tokenizer: Tokenizer) -> ChatFormat | None:
    """The format whose markers the tokenizer has, or None: such a model has completions, but no chat."""
    if tokenizer.special_names >= chat_k3.MARKERS:
        return K3
    if tokenizer.special_names >= chat_k2.MARKERS:
        return K2
    return None

"""Documents to rows of fixed length: token ids, and for each token how much it counts as a target of training.

A conversation is rendered exactly as the endpoint renders it. What the model itself would say counts whole, what it
reads a tenth, plain text a half. The first token it says counts fivefold: it decides whether a tool is called, one
among dozens that hardly decide anything. Documents are never split over rows, plain text apart, and never see padding.
"""

import random
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forebay.cluster.lessons import Lesson
from forebay.router import chat_k3
from forebay.router.grammar_k3 import CLOSE, END_OF_MESSAGE, OPEN, SEP
from forebay.router.segment import EncodeCache, Segment, Text, encode
from forebay.router.tokenizer import Tokenizer

DECIDED, SAID, READ, PLAIN = 50, 10, 1, 5
OPEN_BINS = 48
_PROMPT = (OPEN, Text("message"), Text(" role"), Text('="'), Text("assistant"), Text('"'), SEP)
_NO_THOUGHT = (CLOSE, Text("think"), SEP)


class Document(NamedTuple):
    """ids uint16 [n] and weights uint8 [n]."""

    ids: NDArray[np.uint16]
    weights: NDArray[np.uint8]


def conversation(lesson: Lesson, tokenizer: Tokenizer, cache: EncodeCache) -> Document:
    """A lesson as tokens. Where earlier reasoning is not kept, that it is missing is no lesson."""
    messages = lesson.messages if lesson.kept_reasoning else _forgotten(lesson.messages)
    segments = chat_k3.render(
        messages, lesson.tools or None, thinking=lesson.thinking, effort=lesson.effort, generate=False
    )
    ids: list[int] = []
    weights: list[int] = []
    for segment, weight in zip(segments, _weights(segments), strict=True):
        new = encode([segment], tokenizer, cache)
        ids += new
        weights += [weight, *[min(weight, SAID)] * (len(new) - 1)][: len(new)]
    return Document(np.array(ids, np.uint16), np.array(weights, np.uint8))


def _forgotten(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages without reasoning, but for the last."""
    earlier = [{key: value for key, value in m.items() if key != "reasoning_content"} for m in messages[:-1]]
    return [*earlier, messages[-1]]


def _weights(segments: Sequence[Segment]) -> list[int]:
    """A weight for each segment; DECIDED is for its first token, the others are said."""
    weights = [READ] * len(segments)
    place = 0
    while place < len(segments):
        if tuple(segments[place : place + len(_PROMPT)]) != _PROMPT:
            place += 1
            continue
        place += len(_PROMPT) + 3  # the channel's opening tag is part of the prompt
        if tuple(segments[place : place + 3]) == _NO_THOUGHT:
            weights[place : place + 3] = [0] * 3
            place += 3
        end = segments.index(END_OF_MESSAGE, place) + 1
        weights[place:end] = [DECIDED, *[SAID] * (end - place - 1)]
        place = end
    return weights


def passages(text: str, tokenizer: Tokenizer, length: int) -> list[Document]:
    """Plain text in runs of at most `length` tokens, from [BOS] to [EOS]."""
    ids = [tokenizer.special_id("[BOS]"), *tokenizer.encode_text(text), tokenizer.special_id("[EOS]")]
    whole = np.array(ids, np.uint16)
    runs = [whole[at : at + length] for at in range(0, len(whole), length)]
    return [Document(run, np.full(len(run), PLAIN, np.uint8)) for run in runs]


class _Row:
    """Documents side by side."""

    def __init__(self) -> None:
        self.documents: list[Document] = []
        self.filled = 0

    def add(self, document: Document) -> None:
        self.documents.append(document)
        self.filled += len(document.ids)


def pack(documents: Iterable[Document], length: int, pad: int, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Rows uint16 [N, length] and weights uint8 [N, length]: each document goes to the fullest open row that it fits.

    A document's first token is never a target: nothing before it says what it is. Longer documents are left out.
    """
    bins: list[_Row] = []
    done: list[_Row] = []
    for document in documents:
        if len(document.ids) > length:
            continue
        fits = [row for row in bins if row.filled + len(document.ids) <= length]
        row = max(fits, key=lambda row: row.filled) if fits else _Row()
        row.add(document)
        if not fits:
            bins.append(row)
        if len(bins) > OPEN_BINS:
            fullest = max(range(len(bins)), key=lambda i: bins[i].filled)
            done.append(bins.pop(fullest))
    rows = done + bins
    random.Random(seed).shuffle(rows)
    ids = np.full((len(rows), length), pad, np.uint16)
    weights = np.zeros((len(rows), length), np.uint8)
    for number, placed in enumerate(rows):
        at = 0
        for document in placed.documents:
            end = at + len(document.ids)
            ids[number, at:end], weights[number, at:end] = document.ids, document.weights
            weights[number, at] = 0
            at = end
    return ids, weights

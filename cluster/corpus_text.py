"""Long conversations about facts in running text."""

import random
from collections.abc import Sequence

from forebay.cluster import lesson_needle
from forebay.cluster.lesson_values import Values
from forebay.cluster.lessons import EFFORTS, Lesson, conversation


def needle(seed: int, texts: Sequence[str], characters: int, facts: int, checking: bool = False) -> Lesson:
    """A conversation about facts in a long text."""
    r = random.Random(seed)
    asked = lesson_needle.planted(Values(r, checking), lesson_needle.haystack(r, texts, characters), facts)
    messages = [turn for place, talk in enumerate(asked) for turn in conversation(talk, place, [])]
    thinking = r.random() < 0.6
    return Lesson(
        kind="needle", messages=messages, tools=[], thinking=thinking, effort=r.choice(EFFORTS), kept_reasoning=thinking
    )


def prose(texts: Sequence[str]) -> list[str]:
    """Paragraphs of running text: what haystacks are made of."""
    found = (part.strip().replace("\n", " ") for text in texts for part in text.split("\n\n"))
    return [part for part in found if 80 < len(part) < 1500 and part.count(". ") >= 1 and "``" not in part]

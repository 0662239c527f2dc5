"""Long texts with facts planted at random places, and questions about them at the end."""

import random
from collections.abc import Callable, Sequence

from forebay.cluster.lesson_talk import Talk
from forebay.cluster.lesson_values import Values

THINGS = ("access code", "locker number", "favorite city", "secret word", "license plate", "phone extension")
QUESTIONS = ("What is the {} of {}?", "Tell me the {} of {}.", "Which {} does {} have?", "Find the {} of {}.")


def _value(v: Values, thing: str) -> str:
    draws: dict[str, Callable[[], str]] = {
        "access code": v.code,
        "locker number": v.number,
        "favorite city": v.city,
        "secret word": lambda: v.words(1, 2),
        "license plate": v.code,
        "phone extension": v.number,
    }
    return v.own(draws[thing])


def planted(v: Values, haystack: str, facts: int) -> list[Talk]:
    """`haystack` with `facts` facts between its sentences as the first question, and a question about each fact.

    The first question carries the text; the others refer to it.
    """
    r = v.random
    owners: dict[tuple[str, str], str] = {}
    while len(owners) < facts:
        owners.setdefault((r.choice(THINGS), v.person()), "")
    for thing, owner in owners:
        owners[thing, owner] = _value(v, thing)
    sentences = haystack.split(". ")
    for (thing, owner), value in owners.items():
        sentences.insert(r.randint(0, len(sentences) - 1), f"The {thing} of {owner} is {value}")
    text = ". ".join(sentences)
    asked = list(owners.items())
    r.shuffle(asked)
    return [_asked(r, thing, owner, value, text if i == 0 else "") for i, ((thing, owner), value) in enumerate(asked)]


def _asked(r: random.Random, thing: str, owner: str, value: str, text: str) -> Talk:
    question = r.choice(QUESTIONS).format(thing, owner)
    answer = f"The {thing} of {owner} is {value}."
    full = f"{text}\n\n{question}" if text else question
    return Talk("needle", full, answer, "It stands in the text.", value)


def haystack(r: random.Random, passages: Sequence[str], characters: int) -> str:
    """About `characters` characters of running text out of random passages."""
    parts: list[str] = []
    size = 0
    while size < characters:
        parts.append(r.choice(passages))
        size += len(parts[-1]) + 1
    return "\n".join(parts)[:characters]

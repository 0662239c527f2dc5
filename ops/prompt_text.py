"""Prompt text for a trace that has none: equal block ids give equal text, so reuse is real.

Text is ASCII. A trace's blocks become `block_tokens` tokens of the endpoint, at `chars_per_token` characters each (1 is
right for a tokenizer of bytes), which lets a model with a short context replay a trace of long prompts.
"""

import random
from dataclasses import dataclass
from functools import lru_cache

from forebay.ops.trace import BLOCK_TOKENS, Request

_SENTENCE = (
    "the gate lifts and water falls into the basin where it waits above the turbine until a hand opens another way "
    "for what the river brings by night and day so that each wheel may turn at its own pace and none runs dry"
)
_WORDS = _SENTENCE.split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How a trace's tokens become the endpoint's. Answers shrink by the same factor, then `output_cap` cuts them."""

    block_tokens: int = BLOCK_TOKENS
    chars_per_token: float = 1.0
    output_cap: int | None = None

    @property
    def block_chars(self) -> int:
        return max(1, round(self.block_tokens * self.chars_per_token))

    def prompt_tokens(self, request: Request) -> int:
        return -(-request.input_tokens * self.block_tokens // BLOCK_TOKENS)

    def output_tokens(self, request: Request) -> int:
        tokens = max(1, -(-request.output_tokens * self.block_tokens // BLOCK_TOKENS))
        return min(tokens, self.output_cap) if self.output_cap is not None else tokens


def prompt_text(request: Request, sizes: Sizes) -> str:
    """The request's whole prompt; of its last block as much as the request has."""
    text = "".join(block_text(block, sizes.block_chars) for block in request.hash_ids)
    return text[: -(-request.input_tokens * sizes.block_chars // BLOCK_TOKENS)]


@lru_cache(maxsize=65536)
def block_text(block: int, chars: int) -> str:
    """Exactly `chars` characters, a function of the id alone. The id stands first, so two blocks part at once."""
    rng = random.Random(block)
    text = f"\n{block:x}"
    while len(text) < chars:
        text += " " + rng.choice(_WORDS)
    return text[:chars]

"""Chains of sessions: only what a prompt adds to the last one of its session is hashed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forebay.kvstore.chain import Chain, block_chain
from forebay.kvstore.moves import mark_of

Ids = npt.NDArray[np.int32]

TOKENS_MAX = 1 << 24
"""What is remembered of all sessions together: four bytes a token, and a key of 32 a block."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Last:
    """A session's last prompt, in full blocks."""

    ids: Ids
    keys: tuple[bytes, ...]


class Chains:
    """The session's name says only where to look: ids are compared, so that a wrong name costs time and nothing else.

    Sessions longest without a prompt are forgotten first.
    """

    def __init__(self, block_tokens: int, fingerprint: str, tokens_max: int = TOKENS_MAX) -> None:
        self.tokens = 0
        """Remembered."""
        self._block_tokens = block_tokens
        self._fingerprint = fingerprint
        self._tokens_max = tokens_max
        self._last: dict[tuple[str, str], _Last] = {}

    def chain(self, ids: Sequence[int] | Ids, salt: str, session: str) -> Chain:
        """As `block_chain`; of a known session, blocks that its last prompt has too are not hashed. "": no session."""
        if not session:
            return block_chain(ids, self._block_tokens, self._fingerprint, salt)
        n_tokens = len(ids) // self._block_tokens * self._block_tokens
        own = np.array(ids[:n_tokens], np.int32)
        last = self._last.pop((salt, session), None)
        known = () if last is None else last.keys[: _same(last.ids, own) // self._block_tokens]
        made = block_chain(own, self._block_tokens, self._fingerprint, salt, known)
        self.tokens -= 0 if last is None else len(last.ids)
        self._remember((salt, session), _Last(ids=own, keys=made.keys))
        return made

    def forget(self, session: bytes | None, tenant: bytes | None) -> None:
        """Nothing of this session or tenant (`moves.mark_of`) is remembered."""
        for salt, name in list(self._last):
            if mark_of(name) == session or mark_of(salt) == tenant:
                self.tokens -= len(self._last.pop((salt, name)).ids)

    def _remember(self, name: tuple[str, str], last: _Last) -> None:
        if len(last.ids) > self._tokens_max:
            return
        self._last[name] = last
        self.tokens += len(last.ids)
        while self.tokens > self._tokens_max:
            self.tokens -= len(self._last.pop(next(iter(self._last))).ids)


def _same(a: Ids, b: Ids) -> int:
    """Tokens from the start on in which two prompts agree."""
    n_tokens = min(len(a), len(b))
    differs = a[:n_tokens] != b[:n_tokens]
    return int(differs.argmax()) if differs.any() else n_tokens

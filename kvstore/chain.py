"""Block keys: a chain of hashes over the token ids, so that a key names its block and everything before it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from forebay.kvstore.moves import mark_of

KEY_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """`keys[i]` names tokens [0, (i + 1) * block_tokens) of one prompt, under one model's fingerprint."""

    fingerprint: str
    keys: tuple[bytes, ...]
    tenant: bytes = b""
    """`moves.mark_of` the salt."""


def block_chain(
    ids: Sequence[int] | npt.NDArray[np.int32],
    block_tokens: int,
    fingerprint: str,
    salt: str,
    known: Sequence[bytes] = (),
) -> Chain:
    """Keys of the full blocks of `ids`, 32 bytes each: blake3 over the key before and the block's ids as int32.

    The first follows a seed made of the model's fingerprint and the tenant's salt, each with its length. `known` are
    the first blocks' keys where the caller has them: only the blocks after those are hashed.
    """
    n_blocks = len(ids) // block_tokens
    assert len(known) <= n_blocks
    tokens = np.ascontiguousarray(ids[len(known) * block_tokens : n_blocks * block_tokens], dtype="<i4").tobytes()
    width = block_tokens * 4
    key = known[-1] if known else _seed(fingerprint, salt)
    keys = list(known)
    for start, end in pairwise(range(0, len(tokens) + width, width)):
        key = blake3(key + tokens[start:end]).digest(KEY_BYTES)
        keys.append(key)
    return Chain(fingerprint=fingerprint, keys=tuple(keys), tenant=mark_of(salt))


def _seed(fingerprint: str, salt: str) -> bytes:
    parts = (fingerprint.encode(), salt.encode())
    return blake3(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest(KEY_BYTES)

"""Which session a request belongs to: the key that the ring hashes and that the logs show."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

import msgspec

HEADERS = (
    "x-session-id",
    "x-claude-code-session-id",
    "x-dynamo-session-id",
    "x-smg-routing-key",
    "x-session-token",
    "x-session-affinity",
)

Source = Literal["header", "prompt_cache_key", "user", "content"]
_canonical = msgspec.json.Encoder(order="deterministic").encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """`key` is a digest: what a client calls its session never travels to a cluster or a log."""

    key: str
    source: Source


def digest(value: str) -> str:
    """The ring's key of a session named `value`."""
    return blake2b(value.encode(errors="surrogatepass"), digest_size=12).hexdigest()


def named(headers: Mapping[str, str], cache_key: str | None, user: str | None, metadata_user: str | None) -> str | None:
    """The name that a client gave its session, in the documented order; empty values are none."""
    names = [*(headers.get(header) for header in HEADERS), cache_key, user, metadata_user]
    return next((name for name in names if name), None)


def _source(headers: Mapping[str, str], cache_key: str | None) -> Source:
    if any(headers.get(header) for header in HEADERS):
        return "header"
    return "prompt_cache_key" if cache_key else "user"


def identify(
    headers: Mapping[str, str],
    cache_key: str | None,
    user: str | None,
    metadata_user: str | None,
    opening: bytes,
) -> Session:
    """The request's session. `opening` is what tells a conversation without a name from others.

    Header names in `headers` are lower case, or the mapping ignores case.
    """
    name = named(headers, cache_key, user, metadata_user)
    if name is not None:
        return Session(key=digest(name), source=_source(headers, cache_key))
    return Session(key=blake2b(opening, digest_size=12).hexdigest(), source="content")


def chat_opening(messages: Sequence[Mapping[str, Any]]) -> bytes:
    """The first user message together with what precedes it: it stays the same over all turns of a conversation."""
    roles = [message.get("role") for message in messages]
    end = roles.index("user") + 1 if "user" in roles else len(messages)
    return _canonical(list(messages[:end]))


def ids_opening(ids: Sequence[int], block_tokens: int) -> bytes:
    """The first two blocks of a bare prompt: one block is often a template that everybody shares."""
    return _canonical(list(ids[: 2 * block_tokens]))

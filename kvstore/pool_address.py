"""Where the cluster-wide pool's master is, and what is refused before it can end the process. Pure."""

from dataclasses import dataclass

SCHEME = "mooncake"
PEER_TO_PEER = "P2PHANDSHAKE"
METADATA_SCHEMES = ("http://", "https://", "etcd://")
INSTALL = "pip install 'forebay[mooncake]', and the system library libibverbs1"


class PoolError(Exception):
    """The pool cannot be had: one line, with the way out."""


@dataclass(frozen=True, slots=True)
class PoolAddress:
    host: str
    port: int

    def __str__(self) -> str:
        return f"{SCHEME}://{self.netloc}"

    @property
    def netloc(self) -> str:
        return f"{self.host}:{self.port}"


def parse(text: str) -> PoolAddress | None:
    """`mooncake://HOST:PORT`, or None for `mooncake`: a master of one's own. Raises ValueError."""
    if text == SCHEME:
        return None
    scheme, _, rest = text.partition("://")
    host, colon, port = rest.rpartition(":")
    if scheme != SCHEME or not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"pool: {SCHEME} or {SCHEME}://HOST:PORT, not {text!r}")
    return PoolAddress(host, int(port))


def check_metadata(text: str) -> None:
    """Raises ValueError. Mooncake's library aborts the process on a kind of server that it was built without."""
    if text != PEER_TO_PEER and not text.startswith(METADATA_SCHEMES):
        kinds = ", ".join(f"{scheme}..." for scheme in METADATA_SCHEMES)
        raise ValueError(f"pool_metadata: {PEER_TO_PEER}, {kinds}, not {text!r}: Mooncake's library would abort on it")

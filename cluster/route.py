"""`forebay route KEY`: which cluster is a session's primary, which its backup. The routers' own computation."""

from forebay.cluster.config import EndpointConfig
from forebay.router.ring import rank
from forebay.router.session import digest


def pair(config: EndpointConfig, key: str) -> tuple[str, str | None]:
    """Primary and backup; with one cluster there is no backup."""
    ranked = rank(digest(key), dict.fromkeys(config.cluster_names, 1.0))
    return ranked[0], ranked[1] if len(ranked) > 1 else None


def route(config: EndpointConfig, key: str) -> int:
    primary, backup = pair(config, key)
    print(f"primary {primary}")
    print(f"backup  {backup or '-'}")
    return 0

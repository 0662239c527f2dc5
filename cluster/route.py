"""`forebay route KEY`: which cluster is a session's primary, which its backup. The routers' own computation."""

from forebay.cluster.config import EndpointConfig
from forebay.router.ring import rank
from forebay.router.session import digest


def route(config: EndpointConfig, key: str) -> int:
    ranked = rank(digest(key), dict.fromkeys(config.cluster_names, 1.0))
    print(f"primary {ranked[0]}")
    print(f"backup  {ranked[1] if len(ranked) > 1 else '-'}")
    return 0

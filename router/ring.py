"""Rendezvous (highest random weight) hashing: every session has an ordered list of clusters, computed from names alone.

A cluster's score for a key is -weight / ln(u), u uniform in (0, 1) from a hash of both (Schindelhauer and Schomaker's
logarithmic method): the highest score is first with probability weight / sum of weights, and a cluster that comes or
goes changes no other's score, so only its own sessions move.
"""

from collections.abc import Collection, Mapping
from hashlib import blake2b
from math import log


def score(key: str, cluster: str, weight: float) -> float:
    """The cluster's score for the key, > 0. `weight` is > 0, in any unit that all clusters share."""
    assert weight > 0, f"cluster {cluster} has weight {weight}"
    digest = blake2b(f"{len(cluster)}:{cluster}{key}".encode(), digest_size=8).digest()
    # 52 bits and a half: the smallest and the largest value are exact, so neither 0 nor 1 can come out.
    uniform = ((int.from_bytes(digest, "big") >> 12) + 0.5) / 2.0**52
    return -weight / log(uniform)


def rank(key: str, weights: Mapping[str, float]) -> tuple[str, ...]:
    """All clusters, best first; equal scores by name."""
    return tuple(sorted(weights, key=lambda name: (-score(key, name, weights[name]), name)))


def alive_order(key: str, weights: Mapping[str, float], alive: Collection[str]) -> tuple[str, ...]:
    """The key's alive clusters: first its primary, then its backup, then the rest."""
    return tuple(name for name in rank(key, weights) if name in alive)

"""The order in which a session's clusters are tried: a pure function of ring, liveness and memory."""

from collections.abc import Collection, Mapping

from forebay.router import ring
from forebay.router.memory import Placement


def order(
    session: str,
    weights: Mapping[str, float],
    alive: Collection[str],
    placement: Placement | None,
    primary_cached: bool,
    now: float,
    idle_s: float,
) -> tuple[str, ...]:
    """Alive clusters in the order of trying; empty when none is alive.

    A session that its backup served stays there while it is busy: failback costs a second prefill. It returns when it
    has been idle for `idle_s`, or when its primary still has its cache.
    """
    ranked = ring.alive_order(session, weights, alive)
    if placement is None or placement.cluster not in ranked or placement.cluster == ranked[0]:
        return ranked
    if primary_cached or now - placement.at >= idle_s:
        return ranked
    return (placement.cluster, *(name for name in ranked if name != placement.cluster))


def moved(session: str, weights: Mapping[str, float], placement: Placement | None, cluster: str) -> bool:
    """Is `cluster` another one than served the session last, or than should serve it where that is not known?"""
    return cluster != (placement.cluster if placement is not None else ring.rank(session, weights)[0])

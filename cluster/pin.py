"""Serve's request router for pools of workers that are not alike: a call goes to the worker that it names.

What was measured in Serve 2.60 forbids three shorter ways: an empty answer when the worker is gone hangs the call and
every later one; raising hangs it for ever; FIFOMixin swaps calls once a worker is full. So a call whose worker is
gone goes to any other, which refuses it.
"""

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class PinRouter(RequestRouter):
    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        to: Any = pending_request.kwargs.get("to") if pending_request is not None else None
        pinned = [replica for replica in candidate_replicas if replica.replica_id.unique_id == to]
        return [pinned or candidate_replicas]

"""Who is inside: counts open requests, lets nobody in once it is closed, and can put everybody out."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from forebay.router.outcome import ApiError


class Door:
    """`closed`: the router is going down, and so is not ready."""

    def __init__(self, open_max: int) -> None:
        self.closed = False
        self._open_max = open_max
        self._inside: set[asyncio.Timeout] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._inside)

    @asynccontextmanager
    async def enter(self, seconds: float) -> AsyncIterator[None]:
        """Be inside for at most `seconds`. Raises ApiError when not let in, put out, or too slow."""
        if self.closed:
            raise _going_down()
        if len(self._inside) >= self._open_max:
            text = f"{self._open_max} requests are open already."
            raise ApiError(429, text, outcome="over_budget", code="rate_limit_exceeded", retry_after_s=1)
        scope = asyncio.timeout(seconds)
        try:
            async with scope:
                self._inside.add(scope)
                self._empty.clear()
                try:
                    yield
                finally:
                    self._inside.discard(scope)
                    if not self._inside:
                        self._empty.set()
        except TimeoutError:
            if not scope.expired():
                raise
            if self.closed:
                raise _going_down() from None
            raise ApiError(504, "The request took too long.", outcome="deadline", code="deadline") from None

    async def close(self, drain_s: float) -> None:
        """Let nobody in from now on; after `drain_s` put out whoever is still inside. Returns when all have left."""
        self.closed = True
        try:
            async with asyncio.timeout(drain_s):
                await self._empty.wait()
        except TimeoutError:
            for scope in self._inside:
                if not scope.expired():
                    scope.reschedule(asyncio.get_running_loop().time())
            await self._empty.wait()


def _going_down() -> ApiError:
    return ApiError(503, "This router is going down.", outcome="draining", code="draining", retry_after_s=1)

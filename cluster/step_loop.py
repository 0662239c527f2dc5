"""One thread that owns one worker: it steps while there is work, and runs calls from asyncio between two steps.

The worker itself knows no threads, so everything that touches it goes through this thread. What it says of itself
(`pulse`) is a value made there and read anywhere, so that a heartbeat never waits for a long step.
"""

import asyncio
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from forebay.workers.job import Holder
from forebay.workers.outcome import WorkerStats

T = TypeVar("T")
IDLE_STEP_S = 1.0
"""An idle worker is stepped as well, now and then: reservations and handoffs that nobody fetches time out in a step."""


class Worker(Protocol):
    """What both workers have in common."""

    @property
    def busy(self) -> bool: ...
    def step(self, now: float) -> list[Any]: ...
    def cancel(self, job_id: str) -> None: ...
    def release_holder(self, holder: Holder) -> None: ...
    def stats(self) -> WorkerStats: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """`turns` counts the loop's rounds, so a busy worker whose `turns` stand still hangs; `turned_at` is its clock."""

    stats: WorkerStats
    busy: bool
    turns: int
    turned_at: float

    def stalled_s(self, now: float) -> float:
        """Seconds for which work has waited without a step."""
        return now - self.turned_at if self.busy else 0.0


class StepLoop:
    """Started by `start` in a running asyncio loop, where `deliver` gets what each step brought."""

    def __init__(
        self,
        worker: Worker,
        deliver: Callable[[list[Any]], None],
        clock: Callable[[], float] = time.monotonic,
        die: Callable[[], None] = lambda: os._exit(70),
    ) -> None:
        self.worker = worker
        self._deliver = deliver
        self._clock = clock
        self._die = die
        self._wake = threading.Condition()
        self._calls: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self.pulse = Pulse(stats=worker.stats(), busy=worker.busy, turns=0, turned_at=clock())
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step that it is in."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def say(self, outcomes: list[Any]) -> None:
        """From the thread to asyncio, in order."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._deliver, outcomes)

    def post(self, act: Callable[[], Any]) -> None:
        """Runs `act` in the thread, before the next step, and forgets it."""
        with self._wake:
            self._calls.append(act)
            self._wake.notify()

    async def call(self, act: Callable[[], T]) -> T:
        """Runs `act` in the thread, before the next step; its result. An exception in it ends the process."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.post(lambda: self._answer(future, act))
        return await future

    def _answer(self, future: "asyncio.Future[T]", act: Callable[[], T]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(_resolve, future, act())

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception:
            # A broken invariant: what this worker says can no longer be trusted. Its jobs go on elsewhere.
            traceback.print_exc(file=sys.stderr)
            sys.stderr.flush()
            self._die()

    def _turn(self) -> bool:
        """One round: the calls that wait, then one step. False once `stop` was said."""
        with self._wake:
            self._wake.wait_for(lambda: bool(self._calls) or self._stopping or self.worker.busy, IDLE_STEP_S)
            calls, self._calls = self._calls, deque()
            if self._stopping:
                return False
        for act in calls:
            act()
        # Said before the step too: a step that never returns must look busy.
        self._beat(self.pulse.turns)
        outcomes = self.worker.step(self._clock())
        if outcomes:
            self.say(outcomes)
        self._beat(self.pulse.turns + 1)
        return True

    def _beat(self, turns: int) -> None:
        self.pulse = Pulse(stats=self.worker.stats(), busy=self.worker.busy, turns=turns, turned_at=self._clock())


def _resolve(future: "asyncio.Future[T]", result: T) -> None:
    if not future.done():  # its caller may have gone
        future.set_result(result)

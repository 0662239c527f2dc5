"""The thread that owns a worker: the order of calls and steps, what is said of a step that hangs, how it dies."""

import asyncio
import threading
import time
from typing import Any

import pytest
from local_cluster import request_of
from plain_workers import PlainDecode, PlainPrefill

from forebay.cluster.convert import to_job
from forebay.cluster.step_loop import StepLoop
from forebay.workers.job import Holder

pytestmark = pytest.mark.asyncio
HOLDER = Holder(name="i", epoch=1)


def submit(worker: PlainPrefill, name: str) -> None:
    worker.submit(to_job(request_of(name), name, [], 10.0), HOLDER, 0.0)


async def test_outcomes_arrive_in_asyncio_and_calls_run_in_the_thread() -> None:
    seen: list[Any] = []
    worker = PlainPrefill()
    loop = StepLoop(worker, seen.extend)
    loop.start()
    assert await loop.call(threading.current_thread) is loop._thread
    for name in ("a", "b", "c"):
        loop.post(lambda name=name: submit(worker, name))  # type: ignore[misc]
    async with asyncio.timeout(5):
        while len(seen) < 3:
            await asyncio.sleep(0.01)
    assert [outcome.job_id for outcome in seen] == ["a", "b", "c"]
    assert threading.current_thread() is not loop._thread
    await asyncio.to_thread(loop.stop)


async def test_what_is_said_comes_before_what_the_next_step_brings() -> None:
    seen: list[Any] = []
    worker = PlainPrefill()
    loop = StepLoop(worker, seen.extend)
    loop.start()
    loop.post(lambda: (submit(worker, "a"), loop.say(["said"])))
    await asyncio.sleep(0.1)
    assert seen[0] == "said"
    assert seen[1].job_id == "a"
    await asyncio.to_thread(loop.stop)


async def test_a_busy_loop_that_stands_still_says_so() -> None:
    worker = PlainDecode(step_s=0.0)
    loop = StepLoop(worker, lambda _: None)
    loop.start()
    await asyncio.sleep(0.05)
    assert loop.pulse.stalled_s(time.monotonic() + 100) == 0.0, "an idle loop does not hang"
    worker.hang = True
    worker.running["x"] = to_job(request_of("x", max_tokens=10_000), "x", [], 10.0), [1], []
    loop.post(lambda: None)
    await asyncio.sleep(0.2)
    turns = loop.pulse.turns
    assert loop.pulse.busy
    assert loop.pulse.stalled_s(time.monotonic()) >= 0.1
    worker.hang = False
    await asyncio.sleep(0.1)
    assert loop.pulse.turns > turns
    await asyncio.to_thread(loop.stop)


async def test_a_broken_invariant_ends_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    died = threading.Event()

    class Broken(PlainPrefill):
        def step(self, now: float) -> list[Any]:
            raise AssertionError("free + leased + cached != total")

    loop = StepLoop(Broken(), lambda _: None, die=died.set)
    loop.start()
    assert await asyncio.to_thread(died.wait, 5.0)
    assert "free + leased + cached != total" in capsys.readouterr().err


async def test_an_idle_worker_is_stepped_now_and_then() -> None:
    class Counting(PlainPrefill):
        steps = 0

        def step(self, now: float) -> list[Any]:
            self.steps += 1
            return super().step(now)

    worker = Counting()
    loop = StepLoop(worker, lambda _: None)
    loop.start()
    async with asyncio.timeout(5):
        while worker.steps < 2:
            await asyncio.sleep(0.05)
    assert worker.steps < 10
    await asyncio.to_thread(loop.stop)

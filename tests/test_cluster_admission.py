"""Decode slots go out by priority, then deadline, then arrival; none is lost, none is given twice."""

import asyncio
import random

import pytest
from test_cluster_dispatch import beat_of

from forebay.cluster.admission import Admission
from forebay.cluster.dispatch import NoWorker
from forebay.cluster.registry import Registry
from forebay.workers.job import Failure

pytestmark = pytest.mark.asyncio


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def admission_of(slots: int, queue_jobs: int = 100, workers: int = 1) -> tuple[Admission, Registry]:
    registry, clock = Registry(), Clock()
    for n in range(workers):
        registry.beat(beat_of(f"w{n}", slots=slots), 0.0)
    return Admission(registry, queue_jobs, clock), registry


async def take(
    admission: Admission, job_id: str, priority: int = 0, timeout_s: float = 1.0
) -> str | Failure | NoWorker:
    return await admission.take(job_id, priority=priority, timeout_s=timeout_s, patience_s=0.0)


async def test_slots_go_out_in_order() -> None:
    admission, _ = admission_of(1)
    assert await take(admission, "first") == "w0"
    order: list[str] = []

    async def wait(job_id: str, priority: int, timeout_s: float) -> None:
        worker = await take(admission, job_id, priority, timeout_s)
        assert isinstance(worker, str)
        order.append(job_id)
        admission.give_back(worker, job_id)

    jobs = [("late", 1, 9.0), ("soon", 1, 2.0), ("urgent", 0, 9.0), ("also soon", 1, 2.0)]
    tasks = [asyncio.create_task(wait(*job)) for job in jobs]
    await asyncio.sleep(0.01)
    admission.give_back("w0", "first")
    await asyncio.gather(*tasks)
    assert order == ["urgent", "soon", "also soon", "late"]


async def test_a_full_queue_answers_at_once() -> None:
    admission, _ = admission_of(1, queue_jobs=2)
    await take(admission, "holds")
    waiting = [asyncio.create_task(take(admission, f"waits {n}")) for n in range(2)]
    await asyncio.sleep(0.01)
    refused = await take(admission, "one too many")
    assert isinstance(refused, Failure)
    assert refused.kind == "overloaded"
    for task in waiting:
        task.cancel()


async def test_a_refused_worker_is_left_alone_until_it_beats() -> None:
    admission, registry = admission_of(2)
    worker = await take(admission, "a")
    assert isinstance(worker, str)
    admission.refused(worker, "a")
    waiting = asyncio.create_task(take(admission, "b"))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    registry.beat(beat_of("w0", slots=2), 0.0)
    admission.wake()
    assert await waiting == "w0"


async def test_random_histories_neither_lose_nor_double_a_slot(examples: "type[int]") -> None:
    rng = random.Random(4)
    for _ in range(examples(100)):
        slots = rng.randint(1, 3)
        admission, registry = admission_of(slots, workers=2)
        held: dict[str, str] = {}
        tasks: dict[str, asyncio.Task[str | Failure | NoWorker]] = {}
        for number in range(60):
            act = rng.random()
            if act < 0.5:
                tasks[f"j{number}"] = asyncio.create_task(take(admission, f"j{number}", rng.randint(0, 2), 100.0))
            elif act < 0.65 and tasks:
                tasks.pop(rng.choice(list(tasks))).cancel()
            elif held:
                job = rng.choice(list(held))
                admission.give_back(held.pop(job), job)
            for _ in range(3):
                await asyncio.sleep(0)
            for job in [job for job, task in tasks.items() if task.done()]:
                worker = tasks.pop(job).result()
                assert isinstance(worker, str)
                held[job] = worker
            counted = {job: name for name, entry in registry.all.items() for job in entry.jobs}
            assert counted == held
            assert all(len(entry.jobs) <= slots for entry in registry.all.values())
            assert len(held) == 2 * slots or not tasks, "a job waits beside a free slot"
            assert len(admission) == len(tasks)
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert len(admission) == 0

"""Outboxes: no event is lost between a reader and a job, whichever comes first; nothing is left when both are gone."""

import asyncio
import random
from contextlib import aclosing

import pytest

from forebay.cluster.messages import StepEvent
from forebay.cluster.outbox import Outboxes
from forebay.workers.job import Failure, Holder, TokenChoice
from forebay.workers.outcome import Emitted

pytestmark = pytest.mark.asyncio
OLD, NEW = Holder(name="i", epoch=1), Holder(name="i", epoch=2)


def emitted(job_id: str, token: int, last: bool = False) -> Emitted:
    return Emitted(job_id=job_id, tokens=(TokenChoice(id=token),), finish="length" if last else None)


async def read_all(outboxes: Outboxes, stream: str, into: list[StepEvent], holder: Holder = OLD) -> None:
    async with aclosing(outboxes.read(holder, stream)) as items:
        async for events in items:
            into += events


async def test_events_before_the_reader_are_kept() -> None:
    outboxes, seen = Outboxes(), []
    outboxes.enter("a", OLD, "s")
    outboxes.put([emitted("a", 1)])
    reader = asyncio.create_task(read_all(outboxes, "s", seen))
    await asyncio.sleep(0.01)
    outboxes.put([emitted("a", 2, last=True)])
    outboxes.leave("a")
    await asyncio.sleep(0.01)
    assert [event.tokens[0].id for event in seen] == [1, 2]
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    assert len(outboxes) == 0


async def test_one_step_is_one_item_a_stream() -> None:
    outboxes, items = Outboxes(), []

    async def read() -> None:
        async for events in outboxes.read(OLD, "s"):
            items.append(events)

    outboxes.enter("a", OLD, "s")
    outboxes.enter("b", OLD, "s")
    reader = asyncio.create_task(read())
    await asyncio.sleep(0.01)
    outboxes.put([emitted("a", 1), emitted("b", 2)])
    await asyncio.sleep(0.01)
    assert items == [[emitted("a", 1), emitted("b", 2)]]
    reader.cancel()


async def test_a_reader_that_goes_ends_its_jobs() -> None:
    outboxes = Outboxes()
    ended = outboxes.enter("a", OLD, "s")
    other = outboxes.enter("b", OLD, "t")
    reader = asyncio.create_task(read_all(outboxes, "s", []))
    await asyncio.sleep(0.01)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    assert ended.is_set()
    assert not other.is_set()


async def test_a_dead_holders_streams_end() -> None:
    outboxes = Outboxes()
    old, new = outboxes.enter("a", OLD, "s"), outboxes.enter("b", NEW, "t")
    reader = asyncio.create_task(read_all(outboxes, "s", []))
    await asyncio.sleep(0.01)
    outboxes.release(OLD)
    await reader
    assert old.is_set()
    assert not new.is_set()
    outboxes.leave("a")
    assert len(outboxes) == 1


async def test_a_failure_ends_its_job() -> None:
    outboxes = Outboxes()
    ended = outboxes.enter("a", OLD, "s")
    outboxes.put([Failure(job_id="a", kind="deadline", message="")])
    assert ended.is_set()


async def test_random_histories_lose_nothing_and_leave_nothing(examples: "type[int]") -> None:
    rng = random.Random(1)
    for _ in range(examples(200)):
        outboxes, wanted, seen, readers, jobs = Outboxes(), {}, {}, {}, {}
        for number in range(40):
            act = rng.random()
            if act < 0.3:
                stream = f"s{rng.randrange(3)}"
                jobs[f"j{number}"] = stream
                outboxes.enter(f"j{number}", OLD, stream)
            elif act < 0.4 and (stream := f"s{rng.randrange(3)}") not in readers:
                readers[stream] = asyncio.create_task(read_all(outboxes, stream, seen.setdefault(stream, [])))
            elif act < 0.9 and jobs:
                job = rng.choice(list(jobs))
                wanted.setdefault(jobs[job], []).append(emitted(job, number))
                outboxes.put([emitted(job, number)])
            elif jobs:
                job = rng.choice(list(jobs))
                del jobs[job]
                outboxes.leave(job)
            if rng.random() < 0.3:
                await asyncio.sleep(0)
        for stream in wanted:
            if stream not in readers:
                readers[stream] = asyncio.create_task(read_all(outboxes, stream, seen.setdefault(stream, [])))
        for _ in range(5):
            await asyncio.sleep(0)
        assert {stream: events for stream, events in seen.items() if events} == wanted
        for reader in readers.values():
            reader.cancel()
        await asyncio.gather(*readers.values(), return_exceptions=True)
        for job in jobs:
            outboxes.leave(job)
        assert len(outboxes) == 0

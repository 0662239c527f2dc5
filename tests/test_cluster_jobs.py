"""Jobs through a whole cluster in one event loop: what clients see when workers die, hang, are full or are gone."""

import asyncio
import random
from functools import partial
from typing import Any

import pytest
from local_cluster import LocalCluster, request_of, tokens_of
from plain_workers import PlainDecode, PlainPrefill, expected

from forebay.cluster.convert import to_job
from forebay.router.wire import Failed, Finished, JobRequest, Started

pytestmark = pytest.mark.asyncio


def tokens_expected(request: JobRequest) -> list[int]:
    return expected(to_job(request, request.id, [], 1.0))


async def assert_all_free(cluster: LocalCluster) -> None:
    """Nothing is held anywhere: in the ingress, in the replicas, in the workers."""
    assert cluster.ingress is not None

    def free() -> bool:
        status = cluster.ingress.status()  # type: ignore[union-attr]
        prefill, decode = cluster.worker("prefill"), cluster.worker("decode")
        mine = status["open_jobs"] + status["queued_jobs"] + status["streams"]
        replicas = sum(len(replica._outboxes) for replica in cluster.replicas.values() if replica.kind == "decode")  # type: ignore[attr-defined]
        jobs = sum(len(entry.jobs) for entry in cluster.ingress.workers().values())  # type: ignore[union-attr]
        workers = len(prefill.queue) + len(prefill.kept) + len(decode.slots) + len(decode.running)
        return mine + replicas + jobs + workers == 0

    await cluster.until(free)


async def test_a_job_is_streamed_whole() -> None:
    async with LocalCluster() as cluster:
        frames = await cluster.run(request_of("a"))
        assert frames[0] == Started(cached_tokens=0, computed_tokens=9)
        assert frames[-1] == Finished(reason="length")
        assert tokens_of(frames) == tokens_expected(request_of("a"))
        await assert_all_free(cluster)


async def test_more_jobs_than_slots_wait_for_one() -> None:
    async with LocalCluster(decode=partial(PlainDecode, 0.001, 2)) as cluster:
        requests = [request_of(f"job-{n:02}") for n in range(12)]
        answers = await asyncio.gather(*(cluster.run(request) for request in requests))
        assert [tokens_of(frames) for frames in answers] == [tokens_expected(request) for request in requests]
        await assert_all_free(cluster)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
async def test_a_killed_worker_is_not_seen_by_its_clients(kind: str) -> None:
    async with LocalCluster(partial(PlainPrefill, 0.05), partial(PlainDecode, 0.005)) as cluster:
        requests = [request_of(f"job-{n}", max_tokens=60) for n in range(4)]
        jobs = [asyncio.create_task(cluster.run(request)) for request in requests]
        victim = cluster.worker(kind)  # type: ignore[arg-type]
        held = victim.queue if kind == "prefill" else victim.running
        await cluster.until(lambda: len(held) >= 2)
        await cluster.kill(cluster.name(kind))  # type: ignore[arg-type]
        await asyncio.sleep(0.3)
        cluster.start_worker(kind)  # type: ignore[arg-type]
        answers = await asyncio.gather(*jobs)
        assert [tokens_of(frames) for frames in answers] == [tokens_expected(request) for request in requests]
        assert all(sum(isinstance(frame, Started) for frame in frames) == 1 for frames in answers)
        await assert_all_free(cluster)


async def test_workers_killed_at_random_cost_no_token(examples: "type[int]") -> None:
    rng = random.Random(5)
    async with LocalCluster(partial(PlainPrefill, 0.002), partial(PlainDecode, 0.002)) as cluster:
        for kind in ("prefill", "decode"):
            cluster.start_worker(kind)  # type: ignore[arg-type]
        for number in range(examples(60)):
            jobs = [request_of(f"job-{number}-{n}", max_tokens=25) for n in range(5)]
            answers = asyncio.gather(*(cluster.run(request) for request in jobs))
            await asyncio.sleep(rng.uniform(0, 0.1))
            victim = rng.choice(list(cluster.replicas))
            kind = cluster.replicas[victim].kind
            await cluster.kill(victim)
            await asyncio.sleep(rng.uniform(0, 0.05))
            cluster.start_worker(kind)
            assert [tokens_of(frames) for frames in await answers] == [tokens_expected(request) for request in jobs]
        await assert_all_free(cluster)


async def test_a_worker_that_hangs_counts_as_dead() -> None:
    async with LocalCluster(decode=partial(PlainDecode, 0.002)) as cluster:
        job = asyncio.create_task(cluster.run(request_of("a", max_tokens=500)))
        hung = cluster.worker("decode")
        await cluster.until(lambda: len(hung.running) == 1)
        hung.hang = True
        cluster.start_worker("decode")
        frames = await job
        hung.hang = False
        assert tokens_of(frames) == tokens_expected(request_of("a", max_tokens=500))


async def test_a_job_that_kills_three_workers_is_given_up() -> None:
    async with LocalCluster(decode=partial(PlainDecode, 0.002)) as cluster:
        job = asyncio.create_task(cluster.run(request_of("a", max_tokens=10_000)))
        for _ in range(3):
            worker = cluster.worker("decode")
            await cluster.until(lambda worker=worker: len(worker.running) == 1)
            await cluster.kill(cluster.name("decode"))
            cluster.start_worker("decode")
        last = (await job)[-1]
        assert isinstance(last, Failed)
        assert last.kind == "internal"
        await assert_all_free(cluster)


async def test_a_client_that_goes_frees_everything() -> None:
    async with LocalCluster(partial(PlainPrefill, 0.05), partial(PlainDecode, 0.002)) as cluster:
        for wait_s in (0.0, 0.001, 0.02, 0.06, 0.12, 0.2):
            jobs = [asyncio.create_task(cluster.run(request_of(f"{wait_s}-{n}", max_tokens=10_000))) for n in range(6)]
            await asyncio.sleep(wait_s)
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            await assert_all_free(cluster)


async def test_a_job_fails_at_its_deadline() -> None:
    async with LocalCluster(decode=partial(PlainDecode, 0.05)) as cluster:
        frames = await cluster.run(request_of("a", max_tokens=10_000, timeout_s=0.5))
        assert isinstance(frames[-1], Failed)
        assert frames[-1].kind == "deadline"
        await assert_all_free(cluster)


async def test_without_workers_the_answer_is_at_once() -> None:
    async with LocalCluster() as cluster:
        await cluster.kill(cluster.name("decode"))
        assert cluster.ingress is not None
        await cluster.until(lambda: cluster.ingress.refusal() is not None)  # type: ignore[union-attr]
        refusal = cluster.ingress.refusal()
        assert refusal is not None
        assert refusal.kind == "no_workers"
        assert not cluster.ingress.ready
        async with asyncio.timeout(1.0):
            frames = await cluster.run(request_of("a"))
        assert isinstance(frames[-1], Failed)
        assert frames[-1].kind == "no_workers"


async def test_a_dead_ingress_loses_what_it_held_within_two_seconds() -> None:
    async with LocalCluster(partial(PlainPrefill, 0.3), partial(PlainDecode, 0.002, 12)) as cluster:
        jobs = [asyncio.create_task(cluster.run(request_of(f"job-{n}", max_tokens=100_000))) for n in range(12)]
        prefill, decode = cluster.worker("prefill"), cluster.worker("decode")
        await cluster.until(lambda: len(decode.running) >= 2 and bool(prefill.queue))
        started = asyncio.get_running_loop().time()
        cluster.kill_ingress()
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        assert len(decode.running) >= 2
        await cluster.until(lambda: not (decode.slots or decode.running or prefill.queue or prefill.kept))
        assert asyncio.get_running_loop().time() - started < 2.0
        replicas: dict[str, Any] = {replica.kind: replica for replica in cluster.replicas.values()}
        await cluster.until(lambda: not (replicas["prefill"]._waiting or len(replicas["decode"]._outboxes)), 1.0)
        assert not any(cluster.in_flight.values()), "a call of the dead ingress still waits in a worker"
        cluster.start_ingress()
        await cluster.until(lambda: cluster.ingress is not None and cluster.ingress.ready)
        assert tokens_of(await cluster.run(request_of("after"))) == tokens_expected(request_of("after"))


async def test_a_new_epoch_frees_the_old_ones_jobs_at_once() -> None:
    async with LocalCluster(decode=partial(PlainDecode, 0.002)) as cluster:
        job = asyncio.create_task(cluster.run(request_of("a", max_tokens=100_000)))
        decode = cluster.worker("decode")
        await cluster.until(lambda: len(decode.running) == 1)
        cluster.kill_ingress()
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
        cluster.start_ingress()
        await cluster.until(lambda: not decode.running, wait_s=1.0)

"""The ingress over real HTTP, around a cluster in one event loop: statuses, frames, disconnects, metrics."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial

import aiohttp
import pytest
import uvicorn
from endpoint import free_ports
from local_cluster import LocalCluster, request_of, tokens_of
from plain_workers import PlainDecode, PlainPrefill, expected

from forebay.cluster import ingress_http
from forebay.cluster.convert import to_job
from forebay.cluster.exposition import samples
from forebay.cluster.messages import Begun
from forebay.ops.metrics import TABLE
from forebay.router.wire import Failed, Finished, JobRequest, decode_frame, encode

pytestmark = pytest.mark.asyncio


@contextlib.asynccontextmanager
async def served(cluster: LocalCluster) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    assert cluster.ingress is not None
    port = free_ports(1)[0]
    app = ingress_http.make_app(cluster.ingress)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", lifespan="off"))
    task = asyncio.create_task(server.serve())
    await cluster.until(lambda: server.started)
    async with aiohttp.ClientSession() as session:
        yield session, f"http://127.0.0.1:{port}"
    server.should_exit = True
    await task


async def post(session: aiohttp.ClientSession, url: str, body: bytes) -> tuple[int, list[object]]:
    async with session.post(f"{url}/jobs", data=body) as answer:
        return answer.status, [decode_frame(line) for line in (await answer.read()).splitlines()]


async def test_a_job_is_answered_in_frames() -> None:
    async with LocalCluster() as cluster, served(cluster) as (session, url):
        status, frames = await post(session, url, encode(request_of("a")))
        assert status == 200
        assert frames[-1] == Finished(reason="length")
        assert tokens_of(frames) == expected(to_job(request_of("a"), "a", [], 1.0))  # type: ignore[arg-type]
        for path, wanted in (("ready", 200), ("health", 200), ("status", 200), ("metrics", 200)):
            async with session.get(f"{url}/{path}") as answer:
                assert answer.status == wanted


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b"{}",
        encode(request_of("a")).replace(b'"seed":3', b'"seed":"x"'),
        encode(request_of("a")).replace(b'"n_prompt":9', b'"n_prompt":10'),
        encode(request_of("a")).replace(b'"n_prompt":9', b'"n_prompt":0'),
        encode(request_of("a")).replace(b'"ids":[', b'"ids":[-1,'),
        encode(request_of("a", timeout_s=-1.0)),
        b"\xff\xfe",
    ],
    ids=repr,
)
async def test_a_bad_body_is_refused_and_the_next_is_served(body: bytes) -> None:
    async with LocalCluster() as cluster, served(cluster) as (session, url):
        status, frames = await post(session, url, body)
        assert status == 400
        assert isinstance(frames[0], Failed)
        assert frames[0].kind == "invalid"
        assert (await post(session, url, encode(request_of("a"))))[0] == 200


async def test_a_body_over_the_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress_http, "BODY_BYTES", 100)
    async with LocalCluster() as cluster, served(cluster) as (session, url):
        status, frames = await post(session, url, encode(request_of("a")))
        assert status == 400
        assert isinstance(frames[0], Failed)
        assert "100" in frames[0].message


async def test_no_workers_is_503_at_once() -> None:
    async with LocalCluster() as cluster, served(cluster) as (session, url):
        await cluster.kill(cluster.name("prefill"))
        await cluster.until(lambda: not cluster.ingress.ready)  # type: ignore[union-attr]
        status, frames = await post(session, url, encode(request_of("a")))
        assert status == 503
        assert isinstance(frames[0], Failed)
        assert frames[0].kind == "no_workers"
        async with session.get(f"{url}/ready") as answer:
            assert answer.status == 503


async def test_a_failure_before_the_first_frame_is_a_status() -> None:
    """The only slot is taken, so the second job waits for it until its deadline."""
    async with (
        LocalCluster(decode=partial(PlainDecode, 0.05, 1)) as cluster,
        served(cluster) as (session, url),
        session.post(f"{url}/jobs", data=encode(request_of("holds", max_tokens=10_000))) as holder,
    ):
        await holder.content.readline()
        status, frames = await post(session, url, encode(request_of("waits", timeout_s=0.5)))
        assert status == 504
        assert isinstance(frames[0], Failed)
        assert frames[0].kind == "deadline"


async def test_clients_that_disconnect_free_everything() -> None:
    async with LocalCluster(decode=partial(PlainDecode, 0.002, 8)) as cluster, served(cluster) as (session, url):
        decode = cluster.worker("decode")

        async def leave(number: int) -> None:
            request = request_of(f"job-{number}", max_tokens=100_000)
            with contextlib.suppress(asyncio.TimeoutError):
                async with session.post(
                    f"{url}/jobs", data=encode(request), timeout=aiohttp.ClientTimeout(total=0.05 * (1 + number % 8))
                ) as answer:
                    await answer.read()

        await asyncio.gather(*(leave(number) for number in range(24)))
        await cluster.until(lambda: not decode.slots and not decode.running)
        status = cluster.ingress.status()  # type: ignore[union-attr]
        assert (status["open_jobs"], status["queued_jobs"], status["streams"]) == (0, 0, 0)


async def test_metrics_are_of_the_table_and_count_what_was_done() -> None:
    async with LocalCluster() as cluster:
        requests: list[JobRequest] = [request_of(f"job-{n}", class_name="batch") for n in range(3)]
        await asyncio.gather(*(cluster.run(request) for request in requests))
        ingress = cluster.ingress
        assert ingress is not None
        begun = Begun(
            job_id="x", cached_tokens=60, computed_tokens=40, miss="evicted", tier_tokens={"host": 20, "ssd": 40}
        )
        ingress.counts.looked_up("agent", 100, begun)
        await asyncio.sleep(0.6)  # two beats
        found = {(sample.name, *sorted(sample.labels.items())): sample.value for sample in samples(ingress)}
        assert found["forebay_lookup_tokens_total", ("class", "batch"), ("cluster", "c1")] == 27
        agent = ("class", "agent"), ("cluster", "c1")
        assert found["forebay_hit_tokens_total", *agent, ("tier", "ssd")] == 40
        assert found["forebay_hit_tokens_total", *agent, ("tier", "dram")] == 20
        assert found["forebay_misses_total", *agent, ("reason", "evicted")] == 1
        worker = ("worker", cluster.name("decode"))
        store = ("cluster", "c1"), ("kind", "decode")
        assert found["forebay_restore_seconds_total", *store, ("tier", "ssd"), worker] == 0.5
        assert found["forebay_prefetched_bytes_total", *store, ("tier", "pool"), worker] == 7
        ended = ("forebay_jobs_total", ("cluster", "c1"), ("kind", "decode"), ("outcome", "length"), worker)
        assert found[ended] == 3
        assert found["forebay_workers", ("cluster", "c1"), ("kind", "prefill")] == 1
        pages = [value for name, value in found.items() if name[0] == "forebay_pages" and worker in name]
        assert pages == [5, 2, 1]
        names = {metric.name for metric in TABLE if metric.source == "ingress"}
        assert {name[0] for name in found} <= names


async def test_the_worker_that_served_a_session_is_told_how_its_turn_ended() -> None:
    worker = PlainPrefill()
    async with LocalCluster(prefill=lambda: worker) as cluster, served(cluster) as (session, url):
        await post(session, url, encode(request_of("a", session="s1")))
        for name, body, wanted in (
            ("s1", b'"tool_use"', 204),
            ("unknown", b'"end_turn"', 204),
            ("s1", b'"tired"', 400),
            ("s1", b"x", 400),
        ):
            async with session.put(f"{url}/sessions/{name}/turn", data=body) as answer:
                assert answer.status == wanted
        await cluster.until(lambda: worker.ended)
        assert worker.ended == [("s1", "tool_use")]


async def test_every_prefill_worker_is_told_that_a_session_is_over() -> None:
    made: list[PlainPrefill] = []

    def make() -> PlainPrefill:
        made.append(PlainPrefill())
        return made[-1]

    async with LocalCluster(prefill=make) as cluster, served(cluster) as (session, url):
        cluster.start_worker("prefill")
        await cluster.until(lambda: cluster.ingress is not None and len(cluster.ingress.workers()) == 3)
        async with session.delete(f"{url}/sessions/s1") as answer:
            assert answer.status == 204
        await cluster.until(lambda: all(worker.over == ["s1"] for worker in made))
        assert len(made) == 2

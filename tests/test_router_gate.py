"""The gate: budgets with tasks and time around them, and the 429 that a client sees."""

import asyncio
import threading
import time

import httpx
import pytest
from fake_ingress import until
from openai import RateLimitError
from router_house import body, house, say

from forebay.router import lane
from forebay.router.config import ClassConfig, ClassRule
from forebay.router.gate import Gate, OverBudget

SMALL = ClassConfig(
    name="small", prefill_tokens_per_s=100, burst_tokens=100, resident_bytes=1000, queue_requests=2, queue_wait_s=1.0
)


def gate(config=SMALL):
    return Gate((config,), spare_s=0.0, shared_bytes=0)


def at_rest(it):
    [view] = it.view()
    return (view.reserved_tokens, view.reserved_bytes, view.queued) == (0, 0, 0)


def test_a_waiter_is_let_in_when_another_leaves():
    async def run():
        it, order = gate(), []

        async def use(name, hold_s):
            async with it.admit("small", name, 1, 1000):
                order.append(name)
                await asyncio.sleep(hold_s)

        first = asyncio.create_task(use("one", 0.05))
        await asyncio.sleep(0.01)
        it._ledger._lanes["small"].hold_s = 0.05  # what such requests were seen to hold
        second = asyncio.create_task(use("two", 0.0))
        await asyncio.sleep(0.01)
        assert it.view()[0].queued == 1
        await asyncio.gather(first, second)
        assert order == ["one", "two"]
        assert at_rest(it)

    asyncio.run(run())


def test_a_waiter_is_let_in_when_the_tokens_are_there_with_nobody_leaving():
    async def run():
        it = gate()
        async with it.admit("small", "one", 100, 1):
            began = time.monotonic()
            async with it.admit("small", "two", 20, 1):
                assert time.monotonic() - began >= 0.15

    asyncio.run(run())


def test_cancelled_waiters_and_holders_leave_nothing():
    async def run():
        it = gate()

        async def use():
            async with it.admit("small", "s", 90, 1):
                await asyncio.sleep(10)

        for wait_s in (0.0, 0.01):
            tasks = [asyncio.create_task(use()) for _ in range(3)]
            await asyncio.sleep(wait_s)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert at_rest(it)

    asyncio.run(run())


@pytest.mark.parametrize("order", ["grant_first", "cancel_first"])
def test_a_grant_that_meets_a_cancellation_goes_back(order):
    async def run():
        it = gate()

        async def wait():
            async with it.admit("small", "b", 50, 1):
                raise AssertionError("nobody is there to be let in")

        async with it.admit("small", "a", 100, 1):
            task = asyncio.create_task(wait())
            await asyncio.sleep(0.01)
            assert it.view()[0].queued == 1
            it._clock = lambda: time.monotonic() + 0.6  # the tokens are there now
            if order == "cancel_first":
                task.cancel()
                it._pump()
            else:
                it._pump()
                task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert at_rest(it)
        assert it.view()[0].level_tokens > 50, "what was granted in vain was given back"

    asyncio.run(run())


def test_over_budget_at_once_and_after_waiting():
    async def run():
        it = gate()
        async with it.admit("small", "a", 100, 1000):
            with pytest.raises(OverBudget) as at_once:
                async with it.admit("small", "b", 100, 1000):
                    pass
            assert at_once.value.outcome == "over_budget"
        late = gate()
        async with late.admit("small", "a", 1, 1000):
            late._ledger._lanes["small"].hold_s = 0.1  # such requests were over soon, but this one is not
            with pytest.raises(OverBudget) as waited:
                async with late.admit("small", "c", 1, 1000):
                    pass
            assert waited.value.outcome == "queue_deadline"
        assert at_rest(it)
        assert at_rest(late)

    asyncio.run(run())


BATCH = ClassConfig(
    name="batch",
    priority=1,
    prefill_tokens_per_s=400,
    burst_tokens=400,
    resident_bytes=2**30,
    queue_requests=2,
    queue_wait_s=2,
)
CHAT = ClassConfig(name="chat", prefill_tokens_per_s=1000, burst_tokens=1000, resident_bytes=2**30)
RULES = (ClassRule(class_name="batch", keys=("batch",)), ClassRule(class_name="chat"))
AS_BATCH = {"authorization": "Bearer batch"}


def test_a_429_carries_retry_after_and_a_request_after_it_succeeds_while_the_flood_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(lane, "HELD_S", 1.0)
    with house(tmp_path, say("ok"), clusters=1, classes=(CHAT, BATCH), rules=RULES, spare_s=0.0) as router:
        over, others, stop = [], [], threading.Event()

        def flood(place):
            turn = 0
            while not stop.is_set():
                turn += 1
                answer = router.chat(f"{place}-{turn}" + "x" * 200, headers=AS_BATCH)
                (over if answer.status_code == 429 else others).append(answer)

        threads = [threading.Thread(target=flood, args=(place,)) for place in range(6)]
        for thread in threads:
            thread.start()
        until(lambda: len(over) > 5)
        mine = "mine" + "x" * 200
        refused = router.chat(mine, headers=AS_BATCH)
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert refused.headers["x-forebay-cluster"] == "a"
        assert router.chat("y" * 20).status_code == 200, "the other class does not notice"
        time.sleep(int(refused.headers["retry-after"]))
        accepted = router.chat(mine, headers=AS_BATCH)
        stop.set()
        for thread in threads:
            thread.join()
        assert accepted.status_code == 200
        assert {answer.status_code for answer in others} <= {200}
        router.at_rest()
        assert router.metric("requests_total", outcome="over_budget") > 5


def test_streams_are_refused_by_status_and_the_official_client_knows_it(tmp_path):
    tiny = ClassConfig(
        name="tiny", prefill_tokens_per_s=10, burst_tokens=300, resident_bytes=2**30, queue_requests=1, queue_wait_s=0.3
    )
    with house(tmp_path, say("ok"), clusters=1, classes=(tiny,), rules=(ClassRule(class_name="tiny"),)) as router:
        assert router.chat("x" * 250).status_code == 200
        with pytest.raises(RateLimitError) as caught:
            router.client.chat.completions.create(model="tiny", messages=body("z")["messages"], stream=True)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        router.at_rest()


def test_what_was_computed_is_what_is_charged(tmp_path):
    """A prompt whose blocks another session computed is charged for its tail alone."""
    with house(tmp_path, say("ok"), clusters=1, classes=(CHAT,), rules=(ClassRule(class_name="chat"),)) as router:
        gate_of_a = router.app.state.fleet.gates["a"]
        prompt = {"model": "tiny", "prompt": "w" * 900, "max_tokens": 1}
        assert router.post("/v1/completions", json=prompt | {"user": "first"}).status_code == 200
        assert gate_of_a.view()[0].level_tokens < 300
        until(lambda: gate_of_a.view()[0].level_tokens == 1000)
        assert router.post("/v1/completions", json=prompt | {"user": "second"}).status_code == 200
        assert gate_of_a.view()[0].level_tokens > 900


def test_open_requests_are_bounded(tmp_path):
    with house(tmp_path, say("ok" * 50), clusters=1, open_requests_max=2) as router:
        router.clusters["a"].token_s = 0.05
        threads = [threading.Thread(target=router.chat, args=(str(place),)) for place in range(2)]
        for thread in threads:
            thread.start()
        until(lambda: router.metric("open_streams") == 2)
        refused = router.chat()
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert httpx.get(f"{router.url}/ready").status_code == 200
        router.clusters["a"].token_s = 0
        for thread in threads:
            thread.join()

"""The prefill worker tells the store whose its prompts are, what time it is, and when a session is over."""

from dataclasses import replace
from pathlib import Path

import pytest
from hash_model import HashModel, config_of, job_of

from forebay.kvstore.arena import Arena
from forebay.kvstore.config import ClassShare, StoreConfig
from forebay.workers.job import Holder, Job
from forebay.workers.prefill import PrefillWorker

NORTH = Holder(name="north", epoch=3)


class Serving:
    def __init__(self, folder: Path, store: dict[str, object]) -> None:
        config = config_of(folder)
        kept: StoreConfig = replace(config.store, **store)
        self.worker = PrefillWorker(HashModel(), replace(config, store=kept), Arena(folder, "test", 1 << 17))

    def cached(self, job: Job, now: float) -> int:
        """One whole prompt: how much of it was hit."""
        assert self.worker.submit(job, NORTH, now) is None
        ended = [outcome for _ in range(40) for outcome in self.worker.step(now)]
        self.worker.release_handoff(job.id)
        cached: int = ended[0].cached_tokens
        return cached


def job(session: str, seed: int, **more: object) -> Job:
    return replace(job_of("job", 90, seed=seed), session=session, **more)


def test_a_job_is_of_its_class_and_time_passes_in_a_step(tmp_path: Path) -> None:
    serving = Serving(tmp_path, {"classes": (ClassShare(name="batch", ttl_s=10.0),)})
    for seed, name in enumerate(("batch", "agent")):
        assert serving.cached(job(name, seed, class_name=name), 100.0) == 0
    serving.worker.step(110.0)
    assert serving.worker.memory.store.stats().evicted_pages["device", "expired"] > 0
    assert serving.cached(job("batch", 0, class_name="batch"), 110.0) == 0
    assert serving.cached(job("agent", 1, class_name="agent"), 110.0) == 88
    serving.worker.close()


@pytest.mark.parametrize("purges", [False, True])
def test_a_session_that_is_over_is_purged_where_that_is_configured(tmp_path: Path, purges: bool) -> None:
    serving = Serving(tmp_path, {"purge_ended": purges})
    for number, session in enumerate(("over", "on")):
        serving.cached(job(session, number), 0.0)
    serving.cached(job("over", 0, choice=1), 0.0)
    serving.worker.end_session("over")
    assert serving.cached(job("over", 0), 0.0) == (0 if purges else 88)
    assert serving.cached(job("on", 1), 0.0) == 88
    serving.worker.close()

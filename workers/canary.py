"""An idle worker asks itself whether what it restores is what it computed: one small prompt, cold and then warm.

    due -> cold: nothing is looked up -> warm: resumed from whatever tier it lies in -> due again `every_s` later

Both run through the worker's own queue, behind every job, and are dropped as soon as one comes. In exact mode their
logits are equal bit for bit; the first difference is the worker's end. The prompt is of a tenant of its own, and
nothing is learned from its uses.
"""

import logging

import numpy as np
import numpy.typing as npt

from forebay.kvstore.lookup import Hit
from forebay.workers.job import Holder, Job, Sampling

CANARY = "\0canary"
"""The name of its job and of its tenant: no client has it."""

HOLDER = Holder(name="canary", epoch=0)

BLOCKS, TAIL_TOKENS = 2, 5
TIMEOUT_S = 1e9
PRIORITY = 1 << 30

log = logging.getLogger(__name__)

Logits = npt.NDArray[np.float32]


class Canary:
    """`passed` and `failed` count comparisons in which something was restored."""

    def __init__(self, every_s: float, vocab: int, block_tokens: int) -> None:
        """`every_s` 0: never due."""
        self.passed = self.failed = 0
        self._every_s = every_s
        n_tokens = BLOCKS * block_tokens + TAIL_TOKENS
        self._ids = np.random.default_rng(0).integers(0, vocab, n_tokens, dtype=np.int32)
        self._due_s: float | None = None
        self._cold: Logits | None = None

    @property
    def is_warm(self) -> bool:
        """Is the next run the one that resumes?"""
        return self._cold is not None

    def next_job(self, now: float) -> Job | None:
        """What to run, if it is time: of an idle worker only."""
        if not self._every_s or self.failed:
            return None
        if self._due_s is None:
            self._due_s = now + self._every_s
        if now < self._due_s:
            return None
        return Job(
            id=CANARY,
            ids=self._ids,
            n_prompt=len(self._ids),
            seed=0,
            choice=1,  # a first choice's uses are learned from
            sampling=Sampling(max_tokens=1),
            priority=PRIORITY,
            timeout_s=TIMEOUT_S,
            salt=CANARY,
        )

    def answered(self, logits: Logits, hit: Hit, now: float) -> None:
        """The run's logits [vocab], and what it resumed from."""
        if self._cold is None:
            self._cold = logits
            return
        cold, self._cold, self._due_s = self._cold, None, now + self._every_s
        if not np.array_equal(cold.view(np.uint32), logits.view(np.uint32)):
            self.failed += 1
            tiers = " and ".join(sorted({*hit.tier_tokens, *([hit.state_tier] if hit.state_tier else [])}))
            log.error(
                "canary failed: %d of %d tokens resumed from %s, logits differ from a cold run's by up to %.3g",
                hit.tokens,
                len(self._ids),
                tiers or "nowhere",
                np.abs(cold - logits).max(),
            )
        elif hit.tokens:
            self.passed += 1

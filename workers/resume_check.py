"""The store's canary: what a warm resume computes equals what a cold run computes, bit for bit in the logits.

Every case sends a prompt to workers that hold part of it, and to fresh ones, and compares each row of logits that a
token was chosen from: the prefill's last row, and the decode rows behind the handoff. It states the rule that gives the
boundary at which the prompt must have been resumed, and fails unless the cached tokens are that boundary.

A plant damages restored bytes before anything is computed from them, to show that the check sees it.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import torch

from forebay.kvstore.moves import Tier as KvTier
from forebay.kvstore.pool_address import PoolError
from forebay.kvstore.pool_master import KeptMaster
from forebay.kvstore.pool_tier import PoolTier
from forebay.workers.config import Transfer
from forebay.workers.job import Job
from forebay.workers.local import Completion, LocalPair
from forebay.workers.model import load_model
from forebay.workers.resume_plants import Plant
from forebay.workers.resume_rig import ANSWER_TOKENS, COMPANY, Answer, Record, Rig
from forebay.workers.sequence_model import SequenceModel

TURNS = 4
ROUNDS = 3
LAST_END = "the last block end before the prompt's last token"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    passed: bool
    detail: str


OnCase = Callable[[Case], None]
Tier = Literal["hbm", "dram", "ssd", "mooncake"]
TIERS: tuple[Tier, ...] = get_args(Tier)
"""As the command line calls them. The last one needs a service, and is checked only when it is asked for."""

JOIN_S = 20.0


def check_resume(
    model: str,
    plant: Plant | None = None,
    on_case: OnCase | None = None,
    *,
    tier: Tier | None = None,
    transfer: Transfer = "shared_memory",
    block_tokens: int = 32,
    threads: int = 1,
    device: str = "cpu",
) -> list[Case]:
    """Load the folder or built-in model and run every case, or those of one tier. `on_case` hears each as it is known.

    Raises what `load_model` does, ValueError for a plant that the model cannot have, and PoolError where Mooncake is
    asked for and cannot be had.
    """
    torch.set_num_threads(threads)
    loaded = load_model(model, block_tokens, torch.float32, device)
    return run_cases(loaded, plant, on_case, tier=tier, transfer=transfer, threads=threads)


def run_cases(
    model: SequenceModel,
    plant: Plant | None = None,
    on_case: OnCase | None = None,
    *,
    tier: Tier | None = None,
    transfer: Transfer = "shared_memory",
    threads: int = 1,
) -> list[Case]:
    cases = []
    with tempfile.TemporaryDirectory(prefix="forebay-check-") as run_dir:
        rig = Rig(model, run_dir, plant, threads, transfer)
        tiers = TIERS[:-1] if tier is None else (tier,)
        for group in [_straight, *(group for name in tiers for group in _GROUPS[name])]:
            for case in group(rig):
                cases.append(case)
                if on_case is not None:
                    on_case(case)
    return cases


def _straight(rig: Rig) -> Iterator[Case]:
    """The cold answer itself, against the model alone."""
    job = rig.job("target", rig.ids(rig.longest, seed=0))
    cold = rig.fresh(job)
    yield _case(
        f"cold: {rig.longest} in one call, no store or handoff", "nothing held", 0, rig.straight(job, cold), cold
    )


def _same_prompt_again(rig: Rig) -> Iterator[Case]:
    for name, n_prompt, boundary in _boundaries(rig):
        job = rig.job("target", rig.ids(rig.longest, seed=0)[:n_prompt])
        with rig.pair() as (pair, record):
            pair.run(job)
            record.clear()
            warm = Answer(pair.run(job), record.rows["target"])
        yield _case(f"again: {name}", LAST_END, boundary, rig.fresh(job), warm)


def _longer_prompt_held(rig: Rig) -> Iterator[Case]:
    whole = rig.ids(rig.longest, seed=0)
    with rig.pair(f"interval:{rig.block}") as (pair, record):
        pair.run(rig.job("whole", whole))
        for name, n_prompt, boundary in _boundaries(rig):
            job = rig.job("target", whole[:n_prompt])
            record.clear()
            warm = Answer(pair.run(job), record.rows["target"])
            yield _case(f"part of a longer: {name}", LAST_END, boundary, rig.fresh(job), warm)


def _in_company(rig: Rig) -> Iterator[Case]:
    """The target is prefilled last and warm, so the others decode beside it from its first decode step to its end."""
    ids = rig.ids(rig.longest, seed=0)[: rig.longest - rig.block // 2]
    job = replace(rig.job("target", ids, temperature=1.0), priority=1)
    cold, boundary = rig.fresh(job), (len(ids) - 1) // rig.block * rig.block
    with rig.pair() as (pair, record):
        pair.run(job)
        for company in range(1, COMPANY + 1):
            record.clear()
            completion = pair.run_all([*_others(rig, company), job])[-1]
            assert isinstance(completion, Completion), completion
            case = _case(f"beside {company}", LAST_END, boundary, cold, Answer(completion, record.rows["target"]))
            beside = record.company_of("target")
            detail = f"{case.detail}; {beside} others in each decode step"
            yield replace(case, passed=case.passed and beside == company, detail=detail)


def _others(rig: Rig, company: int) -> list[Job]:
    long_enough = 3 * company + 3 * ANSWER_TOKENS
    prompts = [rig.ids(rig.block + 13 * i, seed=100 * company + i) for i in range(company)]
    return [rig.job(f"other {i}", ids, max_tokens=long_enough) for i, ids in enumerate(prompts)]


def _turns(rig: Rig) -> Iterator[Case]:
    rule = "the last block end of the turn before"
    ids, boundary = rig.ids(rig.longest // 3, seed=5), 0
    with rig.pair("prompt_end+junction") as (pair, record):
        for turn in range(1, TURNS + 1):
            job = rig.job(f"turn {turn}", ids, temperature=1.0)
            warm = Answer(pair.run(job), record.rows[job.id])
            yield _case(f"session: turn {turn}, {len(ids)} tokens", rule, boundary, rig.fresh(job), warm)
            boundary = len(ids) // rig.block * rig.block
            said = rig.ids(rig.block + 5 * turn, seed=turn)
            ids = np.concatenate([ids, np.array(warm.completion.ids, np.int32), said])


def _from_host(rig: Rig) -> Iterator[Case]:
    """A prompt that takes all device pages drives the target to host memory, again and again."""
    pages, _ = rig.narrow()
    with rig.pair(device_pages=pages, host_pages=4 * pages) as (pair, record):
        yield from _driven_down(rig, pair, record, "host")


def _from_ssd(rig: Rig) -> Iterator[Case]:
    """The same to the SSD; then a worker that starts anew finds it there."""
    pages, _ = rig.narrow()
    with rig.pair(device_pages=pages, ssd_pages=8 * pages) as (pair, record):
        yield from _driven_down(rig, pair, record, "ssd")
        pair.run(rig.filling())
    with rig.pair(device_pages=pages, ssd_pages=8 * pages) as (pair, record):
        yield _restored(rig, pair, record, "ssd", "from ssd, after a restart")


def _from_pool(rig: Rig) -> Iterator[Case]:
    """The same to a real Mooncake Store; then a worker that never saw the target takes it over from there."""
    pages, _ = rig.narrow()
    with KeptMaster() as master:
        pool = str(master.address)
        with rig.pair(device_pages=pages, pool=pool) as (pair, record):
            _join(pair)
            pair.run(rig.target())
            assert _pool(pair).traffic.flush(JOIN_S), "it is sent in the background"
            for number in range(1, ROUNDS + 1):
                pair.run(rig.filling())
                yield _restored(rig, pair, record, "pool", f"from the pool, {number}")
            with rig.pair(device_pages=pages, pool=pool) as (other, other_record):
                _join(other)
                yield _restored(rig, other, other_record, "pool", "from the pool, by another worker")


def _join(pair: LocalPair) -> None:
    if not _pool(pair).traffic.wait_joined(JOIN_S):
        raise PoolError(f"not joined: {_pool(pair).traffic.failure}")


def _pool(pair: LocalPair) -> PoolTier:
    assert pair.prefill.memory.pool_tier is not None
    return pair.prefill.memory.pool_tier


def _driven_down(rig: Rig, pair: LocalPair, record: Record, tier: KvTier) -> Iterator[Case]:
    pair.run(rig.target())
    for number in range(1, ROUNDS + 1):
        pair.run(rig.filling())
        yield _restored(rig, pair, record, tier, f"from {tier}, {number}")


def _restored(rig: Rig, pair: LocalPair, record: Record, tier: KvTier, name: str) -> Case:
    record.clear()
    job, before = rig.target(), _restored_bytes(pair, tier)
    warm = Answer(pair.run(job), record.rows[job.id])
    restored = _restored_bytes(pair, tier) - before
    case = _case(name, LAST_END, (rig.longest - 1) // rig.block * rig.block, rig.fresh(job), warm)
    return replace(case, passed=case.passed and restored > 0, detail=f"{case.detail}; {restored} bytes from {tier}")


def _restored_bytes(pair: LocalPair, tier: KvTier) -> int:
    return pair.prefill.memory.store.stats().restored_bytes.get(tier, 0)


def _boundaries(rig: Rig) -> Iterator[tuple[str, int, int]]:
    """(name, prompt tokens, the block end before its last token) around every block end of the longest prompt."""
    for k in range(1, rig.longest // rig.block + 1):
        for offset, words in ((-1, "-1"), (0, ""), (1, "+1, a tail of one")):
            n_prompt = k * rig.block + offset
            yield f"{n_prompt} = {k}·{rig.block}{words}", n_prompt, (n_prompt - 1) // rig.block * rig.block


def _case(name: str, rule: str, boundary: int, cold: Answer, warm: Answer) -> Case:
    cached = warm.completion.cached_tokens
    difference = _difference(cold, warm)
    rows = f"1 prefill and {len(cold.rows) - 1} decode rows of logits equal" if difference is None else difference
    return Case(
        name=name,
        passed=cached == boundary and difference is None,
        detail=f"cached {cached} of {boundary} ({rule}); {rows}",
    )


def _difference(cold: Answer, warm: Answer) -> str | None:
    """How the rows or tokens differ; None where every bit is equal."""
    assert len(cold.rows) == ANSWER_TOKENS
    if len(warm.rows) != len(cold.rows):
        return f"{len(warm.rows)} rows of logits, not {len(cold.rows)}"
    for number, (a, b) in enumerate(zip(cold.rows, warm.rows, strict=True)):
        if not np.array_equal(a.view(np.uint32), b.view(np.uint32)):
            return f"row {number} of logits differs by up to {np.abs(a - b).max():.3g}"
    return None if cold.completion.ids == warm.completion.ids else "equal logits, other tokens"


_GROUPS: dict[Tier, tuple[Callable[[Rig], Iterator[Case]], ...]] = {
    "hbm": (_same_prompt_again, _longer_prompt_held, _in_company, _turns),
    "dram": (_from_host,),
    "ssd": (_from_ssd,),
    "mooncake": (_from_pool,),
}

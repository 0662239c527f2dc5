"""The two-phase look-up. Pure: it reads the tiers and changes nothing, so a probe is not a use.

blocks of the prompt       0 . . . . . . . . . . . . . n_prompt
1  rows in every group     [0 ................ run)
2  state at a block's end  [0 ....... hit)                        hit <= run, hit <= n_prompt - 1
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from forebay.kvstore.chain import Chain
from forebay.kvstore.index import Checkpoint, Span, TierIndex
from forebay.kvstore.layout import Layout, PagedGroup
from forebay.kvstore.moves import SLOW, TIERS, Tier

MissReason = Literal[
    "never_stored", "evicted", "no_checkpoint", "sibling_missing", "corrupt", "other_model", "wrong_cluster"
]
"""wrong_cluster: never stored here, since the session was served by another cluster until now."""

STATES = "states"
"""Under which name lost checkpoints are remembered, beside the paged groups' own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """What can be restored: the first `tokens` tokens, a multiple of the block and less than the prompt.

    `run_tokens` >= tokens have their rows; beyond them the prompt parts from all that is stored. `tier_tokens` splits
    `tokens` by the lowest tier that a token's rows come from; `state_tier` is the checkpoint's; `slow_bytes` are those
    of its units in tiers that are read in the background. `miss` says why the hit is not longer: None where it could
    not be.
    """

    tokens: int
    run_tokens: int
    miss: MissReason | None
    tier_tokens: dict[Tier, int]
    state_tier: Tier | None
    slow_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A hit and the units that restore it: for each paged group the (tier, span) of each page position, in order."""

    hit: Hit
    spans: dict[str, list[tuple[Tier, Span]]]
    checkpoint: tuple[Tier, Checkpoint] | None

    def slow_units(self) -> list[tuple[Tier, Span | Checkpoint]]:
        """In tiers that are read in the background, each once, rows first."""
        rows = [each for spans in self.spans.values() for each in spans]
        return [each for each in (*rows, self.checkpoint) if each is not None and each[0] in SLOW]


class Lost:
    """Why keys are gone: a bounded memory of the latest `limit` losses."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._why: dict[tuple[str, bytes], MissReason] = {}

    def remember(self, group: str, key: bytes, why: MissReason) -> None:
        self._why.pop((group, key), None)
        self._why[group, key] = why
        if len(self._why) > self._limit:
            del self._why[next(iter(self._why))]

    def why(self, group: str, key: bytes) -> MissReason | None:
        return self._why.get((group, key))


class Lookup:
    """Reads of the tiers, upper tier first."""

    def __init__(self, layout: Layout, tiers: Sequence[TierIndex], lost: Lost, fingerprint: str) -> None:
        self._layout = layout
        self._tiers = tiers
        self._lost = lost
        self._fingerprint = fingerprint

    def find(self, chain: Chain | None, n_prompt: int) -> Found:
        if chain is None:
            return self.nothing(None)
        if chain.fingerprint != self._fingerprint:
            return self.nothing("other_model")
        keys = chain.keys[: max(0, n_prompt - 1) // self._layout.block_tokens]
        run = self._run(keys)
        hit = self._resumable(keys, run)
        return self._found(keys, run, hit)

    def nothing(self, miss: MissReason | None) -> Found:
        hit = Hit(tokens=0, run_tokens=0, miss=miss, tier_tokens={}, state_tier=None)
        return Found(hit=hit, spans={group.name: [] for group in self._layout.paged}, checkpoint=None)

    def span(self, group: str, key: bytes) -> tuple[Tier, Span] | None:
        for tier in self._tiers:
            span = tier.span(group, key)
            if span is not None:
                return tier.tier, span
        return None

    def checkpoint(self, key: bytes) -> tuple[Tier, Checkpoint] | None:
        for tier in self._tiers:
            checkpoint = tier.checkpoints.get(key)
            if checkpoint is not None:
                return tier.tier, checkpoint
        return None

    def last_checkpoint(self, keys: Sequence[bytes]) -> int:
        """Blocks up to the last checkpoint along `keys`, 0 without one."""
        for blocks in range(len(keys), 0, -1):
            if any(keys[blocks - 1] in tier.checkpoints for tier in self._tiers):
                return blocks
        return 0

    def _run(self, keys: Sequence[bytes]) -> int:
        """Phase 1: the longest run of blocks that every paged group holds."""
        run = len(keys)
        for group in self._layout.paged:
            run = self._group_run(group, keys[:run])
        return run

    def _group_run(self, group: PagedGroup, keys: Sequence[bytes]) -> int:
        """Page by page: a span that holds a block holds all of the page before it."""
        per_page = group.page_tokens // self._layout.block_tokens
        upper, *lower = [tier.spans[group.name] for tier in self._tiers]
        for start in range(0, len(keys), per_page):
            for end in range(min(start + per_page, len(keys)), start, -1):
                if keys[end - 1] in upper or any(keys[end - 1] in spans for spans in lower):
                    break
            else:
                return start
            if end < start + per_page:
                return end
        return len(keys)

    def _resumable(self, keys: Sequence[bytes], run: int) -> int:
        """Phase 2: back from the run's end to a checkpoint."""
        return self.last_checkpoint(keys[:run]) if self._layout.states else run

    def _found(self, keys: Sequence[bytes], run: int, hit: int) -> Found:
        block = self._layout.block_tokens
        spans = {group.name: self._spans(group, keys[:hit]) for group in self._layout.paged}
        checkpoint = self.checkpoint(keys[hit - 1]) if hit and self._layout.states else None
        found = Found(
            hit=Hit(
                tokens=hit * block,
                run_tokens=run * block,
                miss=self._miss(keys, run, hit),
                tier_tokens=self._tier_tokens(spans, hit),
                state_tier=checkpoint[0] if checkpoint else None,
            ),
            spans=spans,
            checkpoint=checkpoint,
        )
        slow_bytes = sum(len(unit.pages) * self.page_bytes(unit) for _, unit in found.slow_units())
        return replace(found, hit=replace(found.hit, slow_bytes=slow_bytes)) if slow_bytes else found

    def page_bytes(self, unit: Span | Checkpoint) -> int:
        """What it takes of each of its pages."""
        if isinstance(unit, Checkpoint):
            return self._layout.state_bytes
        row_bytes = next(group.row_bytes for group in self._layout.paged if group.name == unit.group)
        return len(unit.keys) * self._layout.block_tokens * row_bytes

    def _spans(self, group: PagedGroup, keys: Sequence[bytes]) -> list[tuple[Tier, Span]]:
        per_page = group.page_tokens // self._layout.block_tokens
        found = []
        for start in range(0, len(keys), per_page):
            located = self.span(group.name, keys[min(start + per_page, len(keys)) - 1])
            assert located is not None, "phase 1 saw this block"
            found.append(located)
        return found

    def _tier_tokens(self, spans: dict[str, list[tuple[Tier, Span]]], hit: int) -> dict[Tier, int]:
        block = self._layout.block_tokens
        lowest = bytearray(hit)
        for group in self._layout.paged:
            per_page = group.page_tokens // block
            for page, (tier, _) in enumerate(spans[group.name]):
                rank = TIERS.index(tier)
                if rank:
                    part = lowest[page * per_page : (page + 1) * per_page]
                    lowest[page * per_page : (page + 1) * per_page] = bytes(max(rank, old) for old in part)
        return {tier: lowest.count(rank) * block for rank, tier in enumerate(TIERS) if lowest.count(rank)}

    def _miss(self, keys: Sequence[bytes], run: int, hit: int) -> MissReason | None:
        if hit == len(keys):
            return None
        why_not_on = self._why_no_block(keys[run]) if run < len(keys) else None
        if why_not_on != "corrupt" and hit < run and self.last_checkpoint(keys[run:]) == 0:
            return self._lost.why(STATES, keys[run - 1]) or "no_checkpoint"
        assert why_not_on is not None, "a hit that is shorter than the run lacks a checkpoint"
        return why_not_on

    def _why_no_block(self, key: bytes) -> MissReason:
        """Some group lacks the block: why, where a sibling group still has it or a loss is remembered."""
        lacking = [group.name for group in self._layout.paged if self.span(group.name, key) is None]
        reasons = {self._lost.why(group, key) for group in lacking}
        if "corrupt" in reasons:
            return "corrupt"
        if len(lacking) < len(self._layout.paged):
            return "sibling_missing"
        return next((reason for reason in reasons if reason), "never_stored")

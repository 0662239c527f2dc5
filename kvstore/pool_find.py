"""The look-up in the cluster-wide pool: what it has of a prompt that is worth knowing. It asks by batches."""

from collections.abc import Callable, Sequence

from forebay.kvstore.layout import Layout
from forebay.kvstore.moves import Label
from forebay.kvstore.pool_names import checkpoint_labels, run_labels

ASK_LABELS = 256
ROUNDS = 16
"""Checkpoints that are tried, where rows before the newer ones are missing. They may lie in other tiers."""

Exist = Callable[[Sequence[Label]], list[bool] | None]
"""Which of these units are there. None: nobody can say."""


def find(layout: Layout, keys: Sequence[bytes], exist: Exist) -> list[Label]:
    """The newest checkpoint along `keys` and the runs before it; where runs are missing, the newest before that too."""
    found: list[Label] = []
    limit = len(keys)
    for _ in range(ROUNDS):
        end = _last_checkpoint(layout, keys[:limit], found, exist)
        if not end:
            break
        gap = _runs(layout, keys, end, found, exist)
        if gap >= end:
            break
        limit = gap
    return found


def _last_checkpoint(layout: Layout, keys: Sequence[bytes], found: list[Label], exist: Exist) -> int:
    """Blocks up to it, 0 where there is none. Without states any block will do."""
    if not layout.states:
        return len(keys)
    labels = checkpoint_labels(layout, keys, 0)
    for first in range(0, len(labels), ASK_LABELS):
        part = labels[first : first + ASK_LABELS]
        there = exist(part)
        if there is None:
            return 0
        if True in there:
            newest = part[there.index(True)]
            found.append(newest)
            return newest.end_tokens // layout.block_tokens
    return 0


def _runs(layout: Layout, keys: Sequence[bytes], end: int, found: list[Label], exist: Exist) -> int:
    """Add the runs of blocks before `end` that are there. Returns the first block that some group lacks, or `end`."""
    pages = list(run_labels(layout, keys, end))
    asked = [label for page in pages for label in page]
    there: list[bool] = []
    for first in range(0, len(asked), ASK_LABELS):
        there += exist(asked[first : first + ASK_LABELS]) or [False] * len(asked[first : first + ASK_LABELS])
    is_there = dict(zip(asked, there, strict=True))
    gap = end
    for page in pages:
        run = next((label for label in page if is_there[label]), None)
        if run is not None:
            found.append(run)
        else:
            gap = min(gap, page[0].start_tokens // layout.block_tokens)
    return gap

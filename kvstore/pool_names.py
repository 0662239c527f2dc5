"""What to ask the cluster-wide pool about a prompt, and what its answers are worth. Pure.

Only what can be resumed is of use: the newest checkpoint of the prompt with all rows before it. So checkpoints are
asked for from the newest back, then the runs of pages up to the one that is there; a run that ends in the middle of a
page has a name of its own, since who kept the checkpoint knew no more of the page then.
"""

from collections.abc import Iterator, Sequence

from forebay.kvstore.layout import Layout, PagedGroup
from forebay.kvstore.lookup import STATES
from forebay.kvstore.moves import Label


def checkpoint_labels(layout: Layout, keys: Sequence[bytes], from_block: int) -> list[Label]:
    """Of every block end beyond `from_block`, the newest first."""
    block = layout.block_tokens
    return [
        Label(group=STATES, keys=(keys[end - 1],), before=None, start_tokens=0, end_tokens=end * block)
        for end in range(len(keys), from_block, -1)
    ]


def run_labels(layout: Layout, keys: Sequence[bytes], end: int) -> Iterator[list[Label]]:
    """For each page of each group that holds blocks before `end`: the runs that would do, the longest first."""
    for group in layout.paged:
        per_page = group.page_tokens // layout.block_tokens
        for first in range(0, end, per_page):
            full, partial = min(first + per_page, len(keys)), min(first + per_page, end)
            ends = [full, partial] if full == first + per_page and full != partial else [partial]
            yield [_run(layout, group, keys, first, last) for last in ends]


def _run(layout: Layout, group: PagedGroup, keys: Sequence[bytes], first: int, last: int) -> Label:
    block = layout.block_tokens
    return Label(
        group=group.name,
        keys=tuple(keys[first:last]),
        before=keys[first - 1] if first else None,
        start_tokens=first * block,
        end_tokens=last * block,
    )

"""How a variable-length batch of KDA prefills is cut: chunks, checkpoints, and segments that run side by side.

A plan is a few small integer tables on the device, made once a batch and used by every KDA layer. Chunks of CHUNK
tokens lie on multiples of CHUNK from each sequence's start; a checkpoint elsewhere ends its chunk early and begins the
next one behind it, so that a state can be kept after any token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

CHUNK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Tables (int32, on the device) of a batch of N sequences packed in T tokens.

    A segment is a run of chunks of one sequence. `segment_final` is its sequence where it is the last of it, else -1;
    segments of sequence n are `sequence_segments[n] .. sequence_segments[n + 1]`.
    """

    lengths: tuple[int, ...]
    chunk_start: Tensor  # [chunks] first token of each
    chunk_rows: Tensor  # [chunks] tokens of each, at most CHUNK
    chunk_slot: Tensor  # [chunks] checkpoint to write after it, -1 none
    segment_first: Tensor  # [segments + 1] first chunk of each
    segment_final: Tensor  # [segments]
    sequence_segments: Tensor  # [N + 1]
    checkpoints: int

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def chunks(self) -> int:
        return self.chunk_start.shape[0]

    @property
    def segments(self) -> int:
        return self.segment_final.shape[0]

    @property
    def segmented(self) -> bool:
        return self.segments > len(self.lengths)


def make_plan(
    lengths: Sequence[int],
    checkpoints: Sequence[Sequence[int]] | None = None,
    segments: int = 1,
    device: torch.device | str = "cpu",
) -> Plan:
    """`lengths` > 0 of the packed sequences; `checkpoints[n]`: ascending token counts of sequence n after which the
    state is kept (slots are numbered in this order over the whole batch); each sequence is cut in up to `segments`.
    """
    starts: list[int] = []
    rows: list[int] = []
    slots: list[int] = []
    first, final, of_sequence = [0], [], [0]
    token, kept = 0, 0
    for n, length in enumerate(lengths):
        ends = tuple(checkpoints[n]) if checkpoints else ()
        assert length > 0, "no sequence is empty"
        assert all(0 < e <= length for e in ends), "checkpoints lie inside their sequence"
        assert list(ends) == sorted(set(ends)), "checkpoints ascend"
        before = len(starts)
        for begin, end in _spans(length, ends):
            starts.append(token + begin)
            rows.append(end - begin)
            slots.append(kept if end in ends else -1)
            kept += end in ends
        cuts = _cuts(len(starts) - before, segments)
        first += [before + cut for cut in cuts]
        final += [-1] * (len(cuts) - 1) + [n]
        of_sequence.append(len(final))
        token += length

    def table(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return Plan(
        lengths=tuple(lengths),
        chunk_start=table(starts),
        chunk_rows=table(rows),
        chunk_slot=table(slots),
        segment_first=table(first),
        segment_final=table(final),
        sequence_segments=table(of_sequence),
        checkpoints=kept,
    )


def segments_to_fill(lengths: Sequence[int], heads: int, processors: int) -> int:
    """In how many parts to cut each sequence so that heads x parts fill the processors; 1 where they do without, or
    where parts would be shorter than a few chunks (a part costs a second pass and its share of the scan).
    """
    filled = 3 * processors // (4 * heads * len(lengths))
    return max(1, min(filled, max(lengths) // (8 * CHUNK)))


def _spans(length: int, ends: tuple[int, ...]) -> list[tuple[int, int]]:
    """[begin, end) of each chunk of a sequence."""
    edges = sorted({0, length, *range(CHUNK, length, CHUNK), *ends})
    return list(pairwise(edges))


def _cuts(chunks: int, segments: int) -> list[int]:
    """Ends of up to `segments` nearly equal runs of `chunks` chunks."""
    parts = min(segments, chunks)
    return [chunks * (i + 1) // parts for i in range(parts)]

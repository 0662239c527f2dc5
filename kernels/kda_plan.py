"""How a variable-length batch of KDA prefills is cut: chunks, checkpoints, segments that run side by side, and spans
that run one behind the other.

A plan is a few small integer tables on the device, made once a batch and used by every KDA layer. Chunks of CHUNK
tokens lie on multiples of it from each sequence's start; a checkpoint elsewhere ends its chunk early and begins the
next one behind it, so that a state can be kept after any token.

What the chunks hand to the scan is far larger than what they were given, so a long batch goes through in spans, runs
of chunks over all sequences: one span's scratch serves the next but one, and its chunks run beside the scan of the
span before.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 32  # half of it is what a bounded gate's decay can be split over: `kda_fused_triton`
SEGMENT_TOKENS_MIN = 512  # a shorter one does not pay for its second pass and its share of the scan
LONE_SPAN_TOKENS = 2_048
SPAN_TOKENS = 32_768


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Chunks `first .. first + chunks`. `segment_first` counts from the span's first chunk; `segment_final` is the
    sequence a segment belongs to where its state is to be written, else -1; `segment_goes_on`: 1 where an earlier span
    has begun the sequence.
    """

    first: int
    chunks: int
    segment_first: Tensor  # [segments + 1]
    segment_final: Tensor  # [segments]
    segment_goes_on: Tensor  # [segments]

    @property
    def segments(self) -> int:
        return self.segment_final.shape[0]


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
    spans: tuple[Span, ...]

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
    span_tokens: int | None = None,
) -> Plan:
    """`lengths` > 0 of the packed sequences; `checkpoints[n]`: ascending token counts of sequence n after which the
    state is kept (slots are numbered in this order over the whole batch); each sequence is cut in up to `segments`.
    `span_tokens`, a multiple of CHUNK: full chunks of so many tokens make a span; without segments it is
    `span_tokens_of` where not given, with them all is one span.
    """
    assert segments == 1 or span_tokens is None, "what is long enough for spans needs no segments"
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
        for begin, end in _chunks(length, ends):
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

    size = len(starts) if segments > 1 else (span_tokens or span_tokens_of(lengths)) // CHUNK
    cuts_of_spans = [(at, _part(first, final, at, min(at + size, len(starts)))) for at in range(0, len(starts), size)]
    return Plan(
        lengths=tuple(lengths),
        chunk_start=table(starts),
        chunk_rows=table(rows),
        chunk_slot=table(slots),
        segment_first=table(first),
        segment_final=table(final),
        sequence_segments=table(of_sequence),
        checkpoints=kept,
        spans=tuple(
            Span(
                first=at,
                chunks=part.first[-1],
                segment_first=table(part.first),
                segment_final=table(part.final),
                segment_goes_on=table(part.goes_on),
            )
            for at, part in cuts_of_spans
        ),
    )


class _Part(NamedTuple):
    first: list[int]
    final: list[int]
    goes_on: list[int]


def _part(first: list[int], final: list[int], begin: int, end: int) -> _Part:
    """The segments that have chunks in begin .. end, as a span counts them."""
    inside = [m for m in range(len(final)) if first[m] < end and first[m + 1] > begin]
    return _Part(
        first=[max(first[m], begin) - begin for m in inside] + [end - begin],
        final=[final[m] for m in inside],
        goes_on=[int(first[m] < begin) for m in inside],
    )


def span_tokens_of(lengths: Sequence[int]) -> int:
    """A lone sequence goes in short spans: its scan, one program a head and half the columns, leaves much of the chip
    to the next span's chunks. Many sequences fill the chip by themselves, and are cut only to bound the scratch.
    """
    return LONE_SPAN_TOKENS if len(lengths) == 1 else SPAN_TOKENS


def segments_to_fill(lengths: Sequence[int], heads: int, processors: int) -> int:
    """In how many parts to cut each sequence so that heads x parts fill the processors; 1 where they do without, or
    where parts would be too short.
    """
    filled = 3 * processors // (4 * heads * len(lengths))
    return max(1, min(filled, max(lengths) // SEGMENT_TOKENS_MIN))


def _chunks(length: int, ends: tuple[int, ...]) -> list[tuple[int, int]]:
    """[begin, end) of each chunk of a sequence."""
    edges = sorted({0, length, *range(CHUNK, length, CHUNK), *ends})
    return list(pairwise(edges))


def _cuts(chunks: int, segments: int) -> list[int]:
    """Ends of up to `segments` nearly equal runs of `chunks` chunks."""
    parts = min(segments, chunks)
    return [chunks * (i + 1) // parts for i in range(parts)]

"""Decode steps of a batch in fast mode: all that a step reads lies on the device, so that a step is one CUDA graph."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from forebay.kvstore.device import DevicePool
from forebay.workers.fast_places import Places
from forebay.workers.step_pages import PageTable

Step = Callable[[], Tensor]
"""Logits [B, V] of one token of each sequence."""


class Decoding:
    """Up to B sequences, token after token. `step` reads ids [B] and lengths [B] (int32, the token included), writes
    rows and states, puts the greedy tokens in ids and counts the lengths on, without a word from the host.

    On a CUDA device the step is captured at the first call, after a run on the spare page that compiles its kernels.
    """

    def __init__(self, pool: DevicePool, places: Places, batch: int) -> None:
        device = pool.bytes.device
        self._places, self._device = places, device
        self.ids = torch.zeros(batch, dtype=torch.int64, device=device)
        self.lengths = torch.ones(batch, dtype=torch.int32, device=device)
        self.logits = torch.empty(0, device=device)
        self._advance: Callable[[], None] | None = None

    def prepare(self, step: Step) -> None:
        """`step` computes the logits from this object's tensors. Nothing may be filled in yet."""

        def advance() -> None:
            self.logits = step()
            self.ids.copy_(self.logits.argmax(1))
            self.lengths.add_(1)

        self._advance = advance if self._device.type != "cuda" else captured(advance)
        self.lengths.fill_(1)

    def fill(self, ids: Tensor, positions: Sequence[int], tables: Sequence[PageTable]) -> None:
        """The tokens ids [n ≤ B] at `positions`, of sequences with these tables; the other rows stand still."""
        n = len(positions)
        self._places.fill(tables)
        self.ids.zero_()
        self.ids[:n].copy_(ids)
        lengths = [position + 1 for position in positions] + [1] * (len(self.ids) - n)
        self.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))

    def step(self) -> Tensor:
        """ids [B] after one more token of each."""
        assert self._advance is not None
        self._advance()
        return self.ids


def captured(run: Callable[[], None]) -> Callable[[], None]:
    """`run` as a graph. It runs once before, beside the current stream, as capturing wants it."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay

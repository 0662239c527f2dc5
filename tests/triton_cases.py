"""Runs the CUDA kernels under Triton's interpreter on small random inputs in fp32 and prints each case's largest
relative error against its twin as JSON. A program of its own: TRITON_INTERPRET is read when the kernels are imported.
"""

import dataclasses
import json
from collections.abc import Callable

import torch
from torch import Tensor

from forebay.kernels import conv, norms
from forebay.kernels import kda_batch as twin
from forebay.kernels import kda_triton as fast
from forebay.kernels.bench_inputs import layer as random_layer
from forebay.kernels.bench_inputs import pages, relative
from forebay.kernels.bench_inputs import prefill as random_prefill
from forebay.kernels.bench_inputs import tokens as random_tokens
from forebay.kernels.kda_batch import Layer, Prefilled
from forebay.kernels.kda_plan import CHUNK, make_plan
from forebay.kernels.shapes import Gate

HEADS, DIM = 2, 32
CPU = torch.device("cpu")


def layer(gate: Gate = "bounded") -> Layer:
    return dataclasses.replace(random_layer(HEADS, DIM, CPU), gate=gate)


def state(n: int) -> Tensor:
    return torch.randn(n, HEADS, DIM, DIM)


def worst(found: Prefilled, right: Prefilled) -> float:
    pairs = [(found.o, right.o), (found.state, right.state)]
    if len(right.checkpoints):
        pairs.append((found.checkpoints, right.checkpoints))
    return max(relative(a, b) for a, b in pairs)


def prefill(gate: Gate, segments: int) -> float:
    """Three sequences, checkpoints on and off the grid of chunks, gates from open to shut."""
    of = layer(gate)
    plan = make_plan((150, 64, 5), ((32, 64, 100), (64,), ()), segments)
    q, k, v, z, beta = random_prefill(plan.tokens, of, torch.float32)
    given = (q, k, v, z * 3, beta)
    before = state(3)
    return worst(fast.prefill(*given, of, plan, before), twin.prefill(*given, of, plan, before))


def equal_keys(raw: float) -> float:
    """All keys alike and beta near 1: the hardest inverse; without decay, or with the most there is."""
    of = layer()
    q, k, v, _, beta = random_prefill(CHUNK, of, torch.float32)
    given = (q, k[:1].expand_as(k).contiguous(), v, torch.full_like(q, raw), beta + 4)
    plan = make_plan((CHUNK,))
    return worst(fast.prefill(*given, of, plan, state(1) * 0), twin.prefill(*given, of, plan, None))


def split(gate: Gate) -> float:
    """Two prefills that meet at a chunk's end leave the bits of one; so does the checkpoint there."""
    of, before = layer(gate), state(1)
    given = random_prefill(2 * CHUNK + 10, of, torch.float32)
    whole = fast.prefill(*given, of, make_plan((2 * CHUNK + 10,), ((CHUNK,),)), before)
    first = fast.prefill(*(x[:CHUNK] for x in given), of, make_plan((CHUNK,)), before)
    second = fast.prefill(*(x[CHUNK:] for x in given), of, make_plan((CHUNK + 10,)), first.state)
    same = torch.equal(whole.o, torch.cat((first.o, second.o))) and torch.equal(whole.state, second.state)
    return 0.0 if same and torch.equal(whole.checkpoints, first.state) else 1.0


def by_channels() -> float:
    """Chunks whose channels are taken a few at a time."""
    of, before, plan = layer(), state(1), make_plan((70,))
    given = random_prefill(70, of, torch.float32)
    few = dataclasses.replace(fast.TUNED, fused_channels=DIM // 2)
    return worst(fast.prefill(*given, of, plan, before, few), twin.prefill(*given, of, plan, before))


def spans(gate: Gate, given_state: bool) -> float:
    """A batch in spans that cut sequences leaves the bits of the same batch at once."""
    of = layer(gate)
    lengths, kept = (150, 64, 5, 70), ((32, 64, 100), (64,), (), (65,))
    q, k, v, z, beta = random_prefill(sum(lengths), of, torch.float32)
    given = (q, k, v, z * 3, beta)
    before = state(4) if given_state else None
    whole = fast.prefill(*given, of, make_plan(lengths, kept), before)
    plan = make_plan(lengths, kept, span_tokens=2 * CHUNK)
    cut = fast.prefill(*given, of, plan, before)
    pairs = ((whole.o, cut.o), (whole.state, cut.state), (whole.checkpoints, cut.checkpoints))
    same = len(plan.spans) > 2 and all(torch.equal(a, b) for a, b in pairs)
    return worst(cut, twin.prefill(*given, of, plan, before)) if same else 1.0


def from_projection() -> float:
    """q, k and v as parts of one projection's rows, and no state before."""
    of = layer()
    plan = make_plan((70,))
    rows = torch.randn(70, 3, HEADS, DIM)
    _, _, _, z, beta = random_prefill(70, of, torch.float32)
    q, k, v = rows.unbind(1)
    whole = (q.contiguous(), k.contiguous(), v.contiguous())
    return worst(fast.prefill(q, k, v, z, beta, of, plan, None), twin.prefill(*whole, z, beta, of, plan, None))


def step(gate: Gate) -> float:
    of, page = layer(gate), torch.tensor([4, 0, 2], dtype=torch.int32)
    states, tails = pages(5, of, torch.float32)
    given = random_tokens((3,), of, torch.float32)
    ours, theirs = (states.clone(), tails.clone()), (states.clone(), tails.clone())
    o, right = fast.step(given, of, *ours, page), twin.step(given, of, *theirs, page)
    return max(relative(o, right), *(relative(a, b) for a, b in zip(ours, theirs, strict=True)))


def middle() -> float:
    """The recurrence alone, and behind the convolutions: the step without its ends, which a norm weight of 1, an open
    output gate and a right scale leave too.
    """
    of, page = layer(), torch.tensor([1, 0], dtype=torch.int32)
    states, tails = pages(2, of, torch.float32)
    given = random_tokens((2,), of, torch.float32)
    ours, whole = (states.clone(), tails.clone()), (states.clone(), tails.clone())
    o = fast.conv_recurrence(given, of, *ours, page)
    normed = norms.gated_rms_norm(o.view(2, HEADS, DIM), given.gate.view(2, HEADS, DIM), of.norm_weight, of.eps)
    right = fast.step(given, of, *whole, page)
    y, _ = conv.short_conv_step(given.x, of.taps.t(), tails[page.long()])
    alone = fast.recurrence(dataclasses.replace(given, x=y), of, states, tails.clone(), page)
    same = torch.equal(ours[0], whole[0]) and torch.equal(ours[1], whole[1])
    return max(relative(normed.flatten(1), right), relative(alone, o), relative(states, ours[0])) if same else 1.0


def replay(gate: Gate, window: int, warps: int = 4, parts: int = 2) -> float:
    """Every accepted count 0..6 of 6 at once: against plain decode by the twin, and bit for bit against the step
    kernel.
    """
    of, page = layer(gate), torch.tensor([3, 1, 0, 5, 4, 6, 7], dtype=torch.int32)
    states, tails = pages(8, of, torch.float32)
    accepted = torch.arange(7, dtype=torch.int32)
    given = random_tokens((7, 6 + window), of, torch.float32)
    ours, theirs, steps = ((states.clone(), tails.clone()) for _ in range(3))
    tuned = dataclasses.replace(fast.TUNED, decode_warps=warps, decode_parts=parts)
    o, right = (
        fast.replay(given, 6, accepted, of, *ours, page, tuned),
        twin.replay(given, 6, accepted, of, *theirs, page),
    )
    for n in range(7):
        for t in range(n):
            fast.step(given.at(n, t), of, *steps, page[n, None], tuned)
    same = all(torch.equal(a, b) for a, b in zip(ours, steps, strict=True))
    errors = [relative(o, right) if window else 0.0, *(relative(a, b) for a, b in zip(ours, theirs, strict=True))]
    return max(errors) if same else 1.0


def untouched() -> float:
    """Pages that are not named keep their bits."""
    of = layer()
    states, tails = pages(3, of, torch.float32)
    before = states.clone(), tails.clone()
    fast.step(random_tokens((1,), of, torch.float32), of, states, tails, torch.tensor([1], dtype=torch.int32))
    kept = all(torch.equal(a[[0, 2]], b[[0, 2]]) for a, b in zip(before, (states, tails), strict=True))
    return 0.0 if kept and not torch.equal(before[0], states) else 1.0


CASES: dict[str, Callable[[], float]] = {
    "prefill-bounded": lambda: prefill("bounded", 1),
    "prefill-bounded-segments": lambda: prefill("bounded", 2),
    "prefill-softplus": lambda: prefill("softplus", 1),
    "prefill-softplus-segments": lambda: prefill("softplus", 2),
    "prefill-equal-keys-open": lambda: equal_keys(-30.0),
    "prefill-equal-keys-shut": lambda: equal_keys(30.0),
    "prefill-by-channels": by_channels,
    "prefill-split": lambda: split("bounded"),
    "prefill-split-softplus": lambda: split("softplus"),
    "prefill-spans": lambda: spans("bounded", True),
    "prefill-spans-softplus-from-zero": lambda: spans("softplus", False),
    "prefill-from-projection": from_projection,
    "step-bounded": lambda: step("bounded"),
    "step-softplus": lambda: step("softplus"),
    "step-without-its-ends": middle,
    "step-other-pages": untouched,
    "replay-and-window": lambda: replay("bounded", 3),
    "replay-alone-two-warps": lambda: replay("softplus", 0, warps=2, parts=4),
}

if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(json.dumps({name: case() for name, case in CASES.items()}))

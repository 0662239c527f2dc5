"""Ways to launch KDA's kernels that have not been measured yet, beside what `kda_tuning.TUNED` does.

Each is checked first, and left out of the race where it is wrong or does not run; then every case of `bench_kda` is
timed in every way, and the fastest of each case named. What wins here is for `TUNED` and its users to take up.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from triton.errors import TritonError

from forebay.kernels import bench_inputs, kda_batch, kda_triton
from forebay.kernels.bench_kda import (
    DECODES,
    OUTPUT_TWIN_MAX,
    SMALL_DECODES,
    STATE_TWIN_MAX,
    DecodeCase,
)
from forebay.kernels.bench_timing import median_ms
from forebay.kernels.kda_batch import Layer, Tokens
from forebay.kernels.kda_tuning import TUNED, Tuning
from forebay.ops.bench_report import Reference, Row

Measured = dict[str, float]


STEP_VARIANTS = {
    "as tuned": TUNED,
    "whole": replace(TUNED, step_halves=False),
    "early, halves": replace(TUNED, step_parts=2),
    "early, halves, 168 registers": replace(TUNED, step_parts=2, step_registers=168),
    "early, quarters": replace(TUNED, step_parts=4),
    "early, quarters, 128 registers": replace(TUNED, step_parts=4, step_registers=128),
}
REPLAY_VARIANTS = {
    "as tuned": TUNED,
    "by halves": replace(TUNED, replay_parts=2),
    "by quarters": replace(TUNED, replay_parts=4),
}


def rows(device: torch.device, repeats: int) -> Iterator[Row]:
    """Every case of decode and replay in every variant that is right."""
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    heads, dim = (96, 128) if on_gpu else (2, 32)
    layer = bench_inputs.layer(heads, dim, device)
    yield from _decode(layer, device, dtype, repeats)
    yield from _replay(layer, 32 if on_gpu else 2, dtype, repeats)


def _tried(name: str, run: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """What a variant gives, or a row that says why it gives nothing: one that cannot run must not end the others."""
    try:
        yield from run()
    except (TritonError, RuntimeError) as problem:
        yield Row(name=f"{name}: does not run, {type(problem).__name__} {str(problem)[:100]}", value=0.0, unit="failed")


def _timed(
    what: str, name: str, run: Callable[[], object], device: torch.device, repeats: int, found: Measured
) -> Iterator[Row]:
    """One figure, beside the way things are tuned; kept in `found`."""

    def measured() -> Iterator[Row]:
        found[name] = median_ms(run, device, repeats)
        tuned = found.get("as tuned")
        beside = Reference(name="as tuned", value=tuned) if tuned else None
        yield Row(name=f"{what}, {name}", value=found[name], unit="ms", reference=beside)

    yield from _tried(f"{what}, {name}", measured)


def _best(what: str, found: Measured, published: Reference | None) -> Iterator[Row]:
    if found:
        name = min(found, key=found.__getitem__)
        yield Row(name=f"{what}: best, {name}", value=found[name], unit="ms", reference=published)


def _decode(layer: Layer, device: torch.device, dtype: torch.dtype, repeats: int) -> Iterator[Row]:
    right = {}
    for name, tuning in STEP_VARIANTS.items():
        made = list(_tried(f"decode, {name}", partial(_step_errors, layer, dtype, name, tuning)))
        yield from made
        if made[0].unit == "relative" and made[0].value <= OUTPUT_TWIN_MAX and made[1].value <= STATE_TWIN_MAX:
            right[name] = tuning
    for case in DECODES if device.type == "cuda" else SMALL_DECODES:
        yield from _decode_rows(case, right, layer, dtype, repeats)


def _step_errors(layer: Layer, dtype: torch.dtype, name: str, tuning: Tuning) -> Iterator[Row]:
    """Against the twin, on the same pages; tails must be equal to the bit."""
    device = layer.A_log.device
    states, tails = bench_inputs.pages(5, layer, dtype)
    page = torch.tensor([4, 0, 2], dtype=torch.int32, device=device)
    given = bench_inputs.tokens((3,), layer, dtype)
    ours, theirs = ((states.clone(), tails.clone()) for _ in range(2))
    found = kda_triton.step(given, layer, *ours, page, tuning)
    right = kda_batch.step(given, layer, *theirs, page)
    yield Row(name=f"decode error of outputs, {name}", value=bench_inputs.relative(found, right), unit="relative")
    state_error = bench_inputs.relative(ours[0], theirs[0]) if torch.equal(ours[1], theirs[1]) else float("inf")
    yield Row(name=f"decode error of state, {name}", value=state_error, unit="relative")


def _decode_rows(
    case: DecodeCase, variants: dict[str, Tuning], layer: Layer, dtype: torch.dtype, repeats: int
) -> Iterator[Row]:
    device = layer.A_log.device
    states, tails = bench_inputs.pages(case.batch + 4, layer, dtype)
    page = torch.randperm(case.batch + 4, device=device)[: case.batch].int()
    given = bench_inputs.tokens((case.batch,), layer, dtype)
    what = f"decode {case.form} B {case.batch}"
    found: Measured = {}
    for name, tuning in variants.items():
        run = partial(getattr(kda_triton, case.form), given, layer, states, tails, page, tuning)
        yield from _timed(what, name, run, device, repeats, found)
    yield from _best(what, found, case.published)


def _replay(layer: Layer, batch: int, dtype: torch.dtype, repeats: int) -> Iterator[Row]:
    """Replay alone, beside one step as tuned."""
    device = layer.A_log.device
    states, tails = bench_inputs.pages(batch, layer, dtype)
    page = torch.arange(batch, device=device, dtype=torch.int32)
    one = bench_inputs.tokens((batch,), layer, dtype)
    step = Reference(
        name="one step", value=median_ms(partial(kda_triton.step, one, layer, states, tails, page), device, repeats)
    )
    drafted = bench_inputs.tokens((batch, 8), layer, dtype)
    for name, tuning in REPLAY_VARIANTS.items():
        yield from _tried(f"replay, {name}", partial(_replay_bits, drafted, layer, (states, tails), page, name, tuning))
    for count in (1, 4, 8):
        accepted = torch.full((batch,), count, dtype=torch.int32, device=device)
        found: Measured = {}
        for name, tuning in REPLAY_VARIANTS.items():
            run = partial(kda_triton.replay, drafted, 8, accepted, layer, states, tails, page, tuning)
            yield from _timed(f"replay of {count} alone, B {batch}", name, run, device, repeats, found)
        yield from _best(f"replay of {count} alone, B {batch}", found, step)


def _replay_bits(
    drafted: Tokens, layer: Layer, pages: tuple[Tensor, Tensor], page: Tensor, name: str, tuning: Tuning
) -> Iterator[Row]:
    """Whether replay leaves the bits of the steps that it replays, for accepted counts from none to all; and how far
    the state is from theirs.
    """
    accepted = torch.arange(len(page), device=page.device, dtype=torch.int32) % 9
    ours, steps = ((pages[0].clone(), pages[1].clone()) for _ in range(2))
    stepping = replace(tuning, step_halves=False, step_parts=tuning.replay_parts)
    kda_triton.replay(drafted, 8, accepted, layer, *ours, page, tuning)
    for n, count in enumerate(accepted.tolist()):
        for t in range(count):
            kda_triton.step(drafted.at(n, t), layer, *steps, page[n, None], stepping)
    same = torch.equal(ours[0], steps[0]) and torch.equal(ours[1], steps[1])
    yield Row(name=f"replay leaves the bits of steps, {name}", value=float(same), unit="of 1")
    yield Row(name=f"replay error of state, {name}", value=bench_inputs.relative(ours[0], steps[0]), unit="relative")

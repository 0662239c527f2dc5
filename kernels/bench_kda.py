"""Measurements of KDA's prefill, decode and replay beside the floor, the figures published, and flash-linear-attention
where it is installed.

The floor is every input read once and every output written once at the copy rate of an H200.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from forebay.kernels import bench_inputs, by_device, kda_batch
from forebay.kernels.bench_timing import median_ms
from forebay.kernels.kda_batch import Layer, Prefilled, Tokens
from forebay.kernels.kda_plan import make_plan, segments_to_fill
from forebay.ops.bench_report import Reference, Row

COPY_BYTES_PER_MS = 4.26e9
OUTPUT_ERROR_MAX, STATE_ERROR_MAX = 6.1e-3, 5.0e-3  # FlashKDA's, published, against the same recurrence
OUTPUT_TWIN_MAX, STATE_TWIN_MAX = 1e-2, 1e-3  # of bf16 outputs, and of fp32 states from bf16 inputs
MIXED = (1300, 547, 2048, 963, 271, 3063)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCase:
    """`published`: the best public figure on an H200; `fla_ms`: fla's, measured beside it on the same machine, so that
    the published figure can be carried over to this one.
    """

    name: str
    lengths: tuple[int, ...]
    heads: int
    head_dim: int = 128
    published: Reference | None = None
    fla_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCase:
    """`form`: the recurrence alone, with the convolutions, or the whole step with norm and output gate."""

    form: str
    batch: int
    heads: int
    head_dim: int = 128
    published: Reference | None = None


def _flash(ms: float) -> Reference:
    return Reference(name="FlashKDA, published", value=ms)


def _vllm(ms: float) -> Reference:
    return Reference(name="vLLM, published", value=ms)


PREFILLS = (
    PrefillCase(name="T 8192 H 96", lengths=(8192,), heads=96, published=_flash(1.405), fla_ms=2.63),
    PrefillCase(name="six sequences H 96", lengths=MIXED, heads=96, published=_flash(1.395)),
    PrefillCase(name="8 x 1024 H 96", lengths=(1024,) * 8, heads=96, published=_flash(1.195)),
    PrefillCase(name="T 1024 H 96", lengths=(1024,), heads=96, published=_flash(0.210)),
    PrefillCase(name="T 65536 H 96", lengths=(65536,), heads=96, published=_flash(10.93)),
    PrefillCase(name="T 8192 H 12", lengths=(8192,), heads=12, published=_vllm(0.661)),
)
DECODES = (
    *(
        DecodeCase(form="recurrence", batch=b, heads=96, published=_vllm(ms))
        for b, ms in ((1, 0.0102), (32, 0.110), (128, 0.404))
    ),
    *(
        DecodeCase(form="conv_recurrence", batch=b, heads=96, published=_vllm(ms))
        for b, ms in ((1, 0.0223), (32, 0.125), (128, 0.445))
    ),
    *(DecodeCase(form="step", batch=b, heads=96) for b in (1, 32, 128)),
)
SMALL_PREFILLS = (PrefillCase(name="T 256 H 2 D 32", lengths=(256,), heads=2, head_dim=32),)
SMALL_DECODES = (DecodeCase(form="step", batch=4, heads=2, head_dim=32),)


def rows(device: torch.device, repeats: int) -> Iterator[Row]:
    """Every measurement that this device can make, checked before it is timed."""
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    yield from check(
        bench_inputs.layer(96 if on_gpu else 2, 128 if on_gpu else 32, device), 1024 if on_gpu else 128, dtype
    )
    yield from check_steps(bench_inputs.layer(96 if on_gpu else 2, 128 if on_gpu else 32, device), dtype)
    for prefill_case in PREFILLS if on_gpu else SMALL_PREFILLS:
        yield from _prefill_rows(prefill_case, device, dtype, repeats)
    for decode_case in DECODES if on_gpu else SMALL_DECODES:
        yield from _decode_rows(decode_case, device, dtype, repeats)
    yield from _replay_rows(32 if on_gpu else 4, 96 if on_gpu else 2, 128 if on_gpu else 32, device, dtype, repeats)


def check(layer: Layer, tokens: int, dtype: torch.dtype) -> Iterator[Row]:
    """Errors against the float64 recurrence, twice on the same inputs; a run that is wrong or wavers ends here."""
    device = layer.A_log.device
    given = bench_inputs.prefill(tokens, layer, dtype)
    state = torch.randn(1, layer.heads, layer.head_dim, layer.head_dim, device=device) * 0.3
    plan = make_plan((tokens,), device=device)
    right_o, right_state = bench_inputs.gold(given, layer, state[0])
    made = by_device.prefill(*given, layer, plan, state)
    yield from _same_bits(given, layer, state, made)
    errors = bench_inputs.relative(made.o, right_o), bench_inputs.relative(made.state[0], right_state)
    assert errors[0] <= OUTPUT_ERROR_MAX, f"prefill's outputs are wrong: {errors}"
    assert errors[1] <= STATE_ERROR_MAX, f"prefill's state is wrong: {errors}"
    names = ("outputs", OUTPUT_ERROR_MAX), ("state", STATE_ERROR_MAX)
    for (name, published), error in zip(names, errors, strict=True):
        yield Row(
            name=f"prefill error of {name}, T {tokens}",
            value=error,
            unit="relative",
            reference=Reference(name="FlashKDA, published", value=published),
        )
    theirs = _fla_prefill(given, layer, state, None)
    if theirs is not None:
        o, last = theirs()
        for name, error in (
            ("outputs", bench_inputs.relative(o[0], right_o)),
            ("state", bench_inputs.relative(last[0], right_state)),
        ):
            yield Row(name=f"prefill error of {name}, T {tokens}: fla", value=error, unit="relative")


def _same_bits(given: bench_inputs.Prefill, layer: Layer, state: Tensor, made: Prefilled) -> Iterator[Row]:
    """The same inputs again, in spans, and as two prefills that meet in the middle must give the bits of `made`, and a
    checkpoint kept there the first one's state.
    """
    tokens, device = len(given[0]), state.device
    half = tokens // 2

    def run(first: int, end: int, before: Tensor, kept: tuple[int, ...] = (), span: int | None = None) -> Prefilled:
        plan = make_plan((end - first,), (kept,), device=device, span_tokens=span)
        q, k, v, z, beta = (x[first:end] for x in given)
        return by_device.prefill(q, k, v, z, beta, layer, plan, before)

    again, spans = run(0, tokens, state, kept=(half,)), run(0, tokens, state, span=tokens // 4)
    early = run(0, half, state)
    late = run(half, tokens, early.state)
    pairs = {
        "again": ((made.o, again.o), (made.state, again.state)),
        "in spans": ((made.o, spans.o), (made.state, spans.state)),
        "in two": ((made.o, torch.cat((early.o, late.o))), (made.state, late.state)),
        "checkpoint": ((again.checkpoints, early.state),),
    }
    for name, compared in pairs.items():
        same = all(torch.equal(one, other) for one, other in compared)
        assert same, f"prefill {name}: other bits"
        yield Row(name=f"prefill keeps its bits, T {tokens}, {name}", value=float(same), unit="of 1")


def check_steps(layer: Layer, dtype: torch.dtype) -> Iterator[Row]:
    """Errors of step and replay against their twins on the same pages; a wrong one ends the run."""
    device = layer.A_log.device
    states, tails = bench_inputs.pages(5, layer, dtype)
    page = torch.tensor([4, 0, 2], dtype=torch.int32, device=device)
    accepted = torch.tensor([0, 2, 3], dtype=torch.int32, device=device)
    given = bench_inputs.tokens((3, 5), layer, dtype)
    found, right = (
        _decoded(kda, given, accepted, layer, states, tails, page) for kda in (by_device.kda(device), kda_batch)
    )
    names = ("outputs of a step", "state after a step", "outputs of a replay", "state after a replay")
    for name, ours, theirs in zip(names, found, right, strict=True):
        error = bench_inputs.relative(ours, theirs)
        assert error <= (STATE_TWIN_MAX if name.startswith("state") else OUTPUT_TWIN_MAX), f"{name}: wrong by {error}"
        yield Row(name=f"decode error of {name}", value=error, unit="relative")
    yield _replays_steps(layer, dtype)


def _replays_steps(layer: Layer, dtype: torch.dtype) -> Row:
    """Of 0 to 8 tokens accepted replay must leave the bits of as many steps, states and tails."""
    device, most = layer.A_log.device, 8
    kda, page = by_device.kda(device), torch.arange(most + 1, device=device, dtype=torch.int32)
    states, tails = bench_inputs.pages(most + 1, layer, dtype)
    replayed, stepped = ((states.clone(), tails.clone()) for _ in range(2))
    given = bench_inputs.tokens((most + 1, most), layer, dtype)
    kda.replay(given, most, page, layer, *replayed, page)
    for n in range(most + 1):
        for t in range(n):
            kda.step(given.at(n, t), layer, *stepped, page[n, None])
    same = all(torch.equal(one, other) for one, other in zip(replayed, stepped, strict=True))
    assert same, "replay leaves other bits than steps"
    return Row(name=f"replay leaves the bits of steps, 0 to {most} accepted", value=float(same), unit="of 1")


def _decoded(
    kda: ModuleType, given: Tokens, accepted: Tensor, layer: Layer, states: Tensor, tails: Tensor, page: Tensor
) -> tuple[Tensor, ...]:
    """A step over the first token, then a replay of three with a window of two, on copies of the pages."""
    S, tail = states.clone(), tails.clone()
    first = Tokens(x=given.x[:, 0], z=given.z[:, 0], beta=given.beta[:, 0], gate=given.gate[:, 0])
    o = kda.step(first, layer, S, tail, page)
    after = S.clone()
    return o, after, kda.replay(given, 3, accepted, layer, S, tail, page), S


def _prefill_rows(case: PrefillCase, device: torch.device, dtype: torch.dtype, repeats: int) -> Iterator[Row]:
    layer = bench_inputs.layer(case.heads, case.head_dim, device)
    given = bench_inputs.prefill(sum(case.lengths), layer, dtype)
    state = torch.randn(len(case.lengths), case.heads, case.head_dim, case.head_dim, device=device)
    plan = make_plan(
        case.lengths, segments=segments_to_fill(case.lengths, case.heads, processors(device)), device=device
    )
    ms = median_ms(lambda: by_device.prefill(*given, layer, plan, state), device, repeats)
    moved = 5 * given[0].nbytes + given[4].nbytes + 2 * state.nbytes
    yield from _beside(f"prefill {case.name}", ms, moved, case.published)
    theirs = _fla_prefill(given, layer, state, case.lengths) if case is PREFILLS[0] else None
    if theirs is not None:
        fla = median_ms(theirs, device, repeats, graph=False)
        yield Row(
            name=f"prefill {case.name}", value=ms, unit="ms", reference=Reference(name="fla, same run", value=fla)
        )
        if case.published is not None and case.fla_ms is not None:
            here = Reference(name=f"{case.published.name}, by fla", value=case.published.value * fla / case.fla_ms)
            yield Row(name=f"prefill {case.name}", value=ms, unit="ms", reference=here)


def _decode_rows(case: DecodeCase, device: torch.device, dtype: torch.dtype, repeats: int) -> Iterator[Row]:
    layer = bench_inputs.layer(case.heads, case.head_dim, device)
    states, tails = bench_inputs.pages(case.batch + 4, layer, dtype)
    page = torch.randperm(case.batch + 4, device=device)[: case.batch].int()
    tokens = bench_inputs.tokens((case.batch,), layer, dtype)
    run: Callable[..., Tensor] = getattr(by_device.kda(device), case.form)
    ms = median_ms(lambda: run(tokens, layer, states, tails, page), device, repeats)
    moved = case.batch * 2 * states[0].nbytes + tokens.x.nbytes + tokens.z.nbytes + tokens.beta.nbytes + tokens.z.nbytes
    if case.form != "recurrence":
        moved += case.batch * 2 * tails[0].nbytes + layer.taps.nbytes
    if case.form == "step":
        moved += tokens.gate.nbytes
    yield from _beside(f"decode {case.form} B {case.batch} H {case.heads}", ms, moved, case.published)


def _replay_rows(
    batch: int, heads: int, head_dim: int, device: torch.device, dtype: torch.dtype, repeats: int
) -> Iterator[Row]:
    layer = bench_inputs.layer(heads, head_dim, device)
    states, tails = bench_inputs.pages(batch, layer, dtype)
    page = torch.arange(batch, device=device, dtype=torch.int32)
    kda = by_device.kda(device)
    one = bench_inputs.tokens((batch,), layer, dtype)
    step_ms = median_ms(lambda: kda.step(one, layer, states, tails, page), device, repeats)
    drafted = bench_inputs.tokens((batch, 8), layer, dtype)
    for count in (1, 4, 8):
        accepted = torch.full((batch,), count, dtype=torch.int32, device=device)
        replay = _replaying(kda.replay, drafted, accepted, layer, states, tails, page)
        ms = median_ms(replay, device, repeats, graph=device.type == "cuda")
        one_step = Reference(name="one step", value=step_ms)
        yield Row(name=f"replay alone, {count} accepted, B {batch} H {heads}", value=ms, unit="ms", reference=one_step)


def _replaying(run: Callable[..., Tensor], drafted: object, *rest: object) -> Callable[[], Tensor]:
    return lambda: run(drafted, 8, *rest)


def _beside(name: str, ms: float, moved_bytes: int, published: Reference | None) -> Iterator[Row]:
    """One figure beside the floor, and beside the best published."""
    yield Row(name=name, value=ms, unit="ms", reference=Reference(name="floor", value=moved_bytes / COPY_BYTES_PER_MS))
    if published is not None:
        yield Row(name=name, value=ms, unit="ms", reference=published)


def _fla_prefill(
    given: bench_inputs.Prefill, layer: Layer, state: Tensor, lengths: tuple[int, ...] | None
) -> Callable[[], tuple[Tensor, Tensor]] | None:
    """flash-linear-attention's operator on the same inputs; None where it is not installed or there is no GPU."""
    if not given[0].is_cuda or importlib.util.find_spec("fla") is None:
        return None
    chunk_kda = importlib.import_module("fla.ops.kda").chunk_kda
    q, k, v, g, beta = (x[None] for x in given)
    ends = None
    if lengths is not None and len(lengths) > 1:
        ends = torch.tensor((0, *lengths), device=q.device).cumsum(0)

    def run() -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            made: tuple[Tensor, Tensor] = chunk_kda(
                q, k, v, g, beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, safe_gate=True,
                lower_bound=layer.lower_bound, A_log=layer.A_log, dt_bias=layer.dt_bias, cu_seqlens=ends,
            )  # fmt: skip
        return made

    return run


def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 for a CPU, where nothing is gained by cutting sequences."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1

"""KDA prefill, second kernel: the state from chunk to chunk, one program a (segment, head, slice of the value columns).

The state's columns are independent, so a head is split over programs; each keeps its slice in registers, fp32, over
the whole segment. It is kept transposed, S^T [BV, D]: then S and U are always the left factor of a product, which the
tensor cores take from registers, and nothing passes through shared memory between two chunks. A sequence cut in
segments runs three passes: `reduce_kernel` gives every segment's transition M and its state from zero,
`compose_kernel` folds them into the state before each segment (S <- M S + S0), and `scan_kernel` finishes all
segments in parallel.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

import triton
import triton.language as tl


@triton.jit
def _advance(S, U, made, decay, tile, C: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr):
    """S <- e^(G_last) S + k_end^T U, transposed; U in the type of the products."""
    i = tl.arange(0, C)
    d = tl.arange(0, D)
    ends = tl.load(made + (tile * 4 + 3) * C * D + i[:, None] * D + d[None, :]).to(U.dtype)
    kept = S * tl.load(decay + tile * D + d)[None, :]
    return tl.dot(U, ends, acc=kept, input_precision=PRECISION)


@triton.jit
def _turned(part, at, ROWS: tl.constexpr, D: tl.constexpr, LOW: tl.constexpr):
    """Rows [ROWS, D] from element `at` on, transposed."""
    i = tl.arange(0, ROWS)
    d = tl.arange(0, D)
    return tl.trans(tl.load(part + at + i[:, None] * D + d[None, :]).to(LOW))


@triton.jit
def _free(made, tile, e, C: tl.constexpr, D: tl.constexpr):
    """The value columns e of u, transposed."""
    i = tl.arange(0, C)
    return tl.load(made + (tile * 4 + 2) * C * D + i[None, :] * D + e[:, None]).to(tl.float32)


@triton.jit
def scan_kernel(
    made, pairs, decay, chunk_start, chunk_rows, chunk_slot, segment_first, segment_final,
    segment_goes_on, state_in, state_out, kept, o, o_stride, H,
    D: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, FROM_ZERO: tl.constexpr, CHECKPOINTS: tl.constexpr,
    SPANS: tl.constexpr, LOW: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """state_in [segments, H, D, D] (absent where FROM_ZERO), state_out [N, H, D, D], kept [checkpoints, H, D, D], all
    fp32; o [T, H, D] with a row stride. SPANS: segments are parts of whole sequences, state_in is [N, H, D, D], and a
    part that goes on reads what the one before it left in state_out. w and q_decay are multiplied at once.
    """
    h = tl.program_id(1).to(tl.int64)
    n = tl.program_id(2)
    i = tl.arange(0, C)
    d = tl.arange(0, D)
    e = tl.program_id(0) * BV + tl.arange(0, BV)
    corner = d[None, :] * D + e[:, None]
    final = tl.load(segment_final + n).to(tl.int64)
    if SPANS:
        goes_on = tl.load(segment_goes_on + n) > 0
        S = tl.load(tl.where(goes_on, state_out, state_in) + (final * H + h) * D * D + corner)
        if FROM_ZERO:
            S = tl.where(goes_on, S, 0.0)
    elif FROM_ZERO:
        S = tl.zeros((BV, D), tl.float32)
    else:
        S = tl.load(state_in + (n * H + h) * D * D + corner)
    for c in tl.range(tl.load(segment_first + n), tl.load(segment_first + n + 1), num_stages=STAGES):
        tile = c * H + h
        S_low = S.to(LOW)
        both = tl.dot(S_low, _turned(made, tile * 4 * C * D, 2 * C, D, LOW), input_precision=PRECISION)
        ws, out = tl.split(tl.permute(tl.reshape(both, (BV, 2, C)), (0, 2, 1)))
        U = (_free(made, tile, e, C, D) - ws).to(LOW)
        S = _advance(S, U, made, decay, tile, C, D, PRECISION)
        out = tl.dot(U, _turned(pairs, tile * C * C, C, C, LOW), acc=out, input_precision=PRECISION)
        t = tl.load(chunk_start + c).to(tl.int64) + i
        live = i < tl.load(chunk_rows + c)
        to = o + t[None, :] * o_stride + (h * D + e)[:, None]
        tl.store(to, out.to(o.dtype.element_ty), mask=live[None, :])
        if CHECKPOINTS:
            slot = tl.load(chunk_slot + c).to(tl.int64)
            if slot >= 0:
                tl.store(kept + (slot * H + h) * D * D + corner, S)
    if final >= 0:
        tl.store(state_out + (final * H + h) * D * D + corner, S)


@triton.jit
def reduce_kernel(
    made, decay, segment_first, transition, from_zero, H, D: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    LOW: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs (slice, head, segment): the first D / BV slices run the state from zero, the others the transition,
    which is the same recurrence from the identity with u = 0. Both [segments, H, D, D] fp32.
    """
    half: tl.constexpr = D // BV
    of_transition = tl.program_id(0) >= half
    h = tl.program_id(1).to(tl.int64)
    n = tl.program_id(2)
    d = tl.arange(0, D)
    e = (tl.program_id(0) % half) * BV + tl.arange(0, BV)
    S = tl.where((d[None, :] == e[:, None]) & of_transition, 1.0, 0.0)
    given = tl.where(of_transition, 0.0, 1.0)
    for c in tl.range(tl.load(segment_first + n), tl.load(segment_first + n + 1), num_stages=STAGES):
        tile = c * H + h
        ws = tl.dot(S.to(LOW), _turned(made, tile * 4 * C * D, C, D, LOW), input_precision=PRECISION)
        U = _free(made, tile, e, C, D) * given - ws
        S = _advance(S, U.to(LOW), made, decay, tile, C, D, PRECISION)
    to = (n * H + h) * D * D + d[None, :] * D + e[:, None]
    if of_transition:
        tl.store(transition + to, S)
    else:
        tl.store(from_zero + to, S)


@triton.jit
def compose_kernel(
    transition, from_zero, sequence_segments, state_in, segment_in, H,
    D: tl.constexpr, BV: tl.constexpr, FROM_ZERO: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Programs (slice, head, sequence): the state before each segment, segment_in [segments, H, D, D], from the
    sequence's own, state_in [N, H, D, D].
    """
    h = tl.program_id(1).to(tl.int64)
    n = tl.program_id(2)
    d = tl.arange(0, D)
    e = tl.program_id(0) * BV + tl.arange(0, BV)
    corner = d[:, None] * D + e[None, :]
    if FROM_ZERO:  # noqa: SIM108
        S = tl.zeros((D, BV), tl.float32)
    else:
        S = tl.load(state_in + (n * H + h) * D * D + corner)
    for m in range(tl.load(sequence_segments + n), tl.load(sequence_segments + n + 1)):
        at = (m * H + h) * D * D
        tl.store(segment_in + at + corner, S)
        M = tl.load(transition + at + d[:, None] * D + d[None, :])
        S = tl.dot(M, S, acc=tl.load(from_zero + at + corner), input_precision=PRECISION)

"""Index keys and queries as fp8 e4m3 with a power-of-two scale each, keys written where they lie in their pages.

Scale and rounding are taken from the bits of the floats: the same codes on a device and under Triton's interpreter,
whose own conversion to fp8 cuts off.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

import triton
import triton.language as tl


@triton.jit
def _power_of_two(amax):
    """The least 2^e with amax / 2^e <= 448; amax at least 1e-4."""
    y = tl.div_rn(tl.maximum(amax, 1e-4), tl.full(amax.shape, 448.0, tl.float32))
    return ((y.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _to_e4m3(x):
    """x, at most 448, to the nearest of e4m3 (ties to even). Adding and taking away 1.5 * 2^23 of its steps rounds, and
    leaves a zero without its sign.
    """
    bits = x.to(tl.int32, bitcast=True)
    exponent = tl.maximum((bits >> 23) & 255, 127 - 6)
    magic = (((exponent - 3 + 23) << 23) | 0x400000).to(tl.float32, bitcast=True)
    rounded = ((x + magic) - magic).to(tl.int32, bitcast=True) | (bits & -0x80000000)
    return rounded.to(tl.float32, bitcast=True).to(tl.float8e4nv)


@triton.jit
def write_keys_kernel(
    keys, positions, table, codes, scales, T, PER, key_row, table_row, page_bytes,
    D: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Program (block): keys [T, D] with a row stride at positions [T] int32 of sequences t // PER. A page is page_bytes
    bytes, seen as codes (fp8) and as scales (fp32): groups of GROUP tokens, their D codes each, then their scales.
    """
    t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, D)
    some = t < T
    x = tl.load(keys + t[:, None] * key_row + d[None, :], mask=some[:, None], other=0.0).to(tl.float32)
    scale = _power_of_two(tl.max(tl.abs(x), 1))
    position = tl.load(positions + t, mask=some, other=0)
    page = tl.load(table + t // PER * table_row + position // PAGE, mask=some, other=0).to(tl.int64)
    group = page * page_bytes + position % PAGE // GROUP * (GROUP * (D + 4))
    place = position % GROUP
    to = codes + (group + place * D)[:, None] + d[None, :]
    tl.store(to, _to_e4m3(x / scale[:, None]), mask=some[:, None])
    tl.store(scales + (group + GROUP * D) // 4 + place, scale, mask=some)


@triton.jit
def quantize_queries_kernel(
    q, w, codes, weights, factor, N, H, w_row, q_row, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (block): N = T H queries, q [T, H, D] and w [T, H] with row strides, into codes [T, H, D] and weights
    [T, H] fp32, the query's scale and `factor` in them.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, D)
    some = i < N
    x = tl.load(q + (i // H * q_row + i % H * D)[:, None] + d[None, :], mask=some[:, None], other=0.0).to(tl.float32)
    scale = _power_of_two(tl.max(tl.abs(x), 1))
    tl.store(codes + i[:, None] * D + d[None, :], _to_e4m3(x / scale[:, None]), mask=some[:, None])
    given = tl.load(w + i // H * w_row + i % H, mask=some, other=0.0).to(tl.float32)
    tl.store(weights + i, given * factor * scale, mask=some)

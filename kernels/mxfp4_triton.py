"""MXFP4 weights unpacked in registers, in a tile of a product's left operand.

A tile of 64 bytes a row is loaded by rows: 8 rows a warp, 16 bytes a thread, which are one scale group. The tensor
cores want another order of rows and columns; `in_order` names it by reshapes alone, under which no element changes its
thread. Columns: see `moe_columns`. Rows: in each 16 WARPS of them, the tile's row 16 w + 8 half + i is the loaded
8 WARPS half + 8 w + i.

A code's three bits, put where bf16 has its lowest exponent bits and highest mantissa bit, are its value times 2^-126,
zero and the subnormal 0.5 included. One product with 2^(s - 1 - DOWN) then gives weight * 2^-DOWN exactly; what is
summed is multiplied by UP once. Exact for scale bytes 27 .. 160 (weights of 2^-101 to 6 * 2^33): smaller ones lose
bits as subnormals, larger ones become infinite or NaN, never another number.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

import triton
import triton.language as tl

DOWN = tl.constexpr(32)
UP = tl.constexpr(2.0**32)
COLUMNS = tl.constexpr(128)
WORDS = tl.constexpr(32)
GROUPS = tl.constexpr(4)

# $4: two packed words; $5: the multiplier twice, bf16. $0 .. $3: the weights of their nibbles, lowest first. Nibbles 16
# bits apart go together; one multiplication makes the copies of which one mask takes the sign, the other three bits.
UNPACK = tl.constexpr("""
{
.reg .b32 a, b, c, d, p;
shr.u32 p, $4, 8;
and.b32 a, $4, 0x000F000F;
mul.lo.u32 a, a, 0x1040;
and.b32 a, a, 0x81C081C0;
and.b32 b, $4, 0x00F000F0;
mul.lo.u32 b, b, 0x104;
and.b32 b, b, 0x81C081C0;
and.b32 c, p, 0x000F000F;
mul.lo.u32 c, c, 0x1040;
and.b32 c, c, 0x81C081C0;
and.b32 d, p, 0x00F000F0;
mul.lo.u32 d, d, 0x104;
and.b32 d, d, 0x81C081C0;
mul.bf16x2 $0, a, $5;
mul.bf16x2 $1, b, $5;
mul.bf16x2 $2, c, $5;
mul.bf16x2 $3, d, $5;
}
""")


@triton.jit
def row_order(i, WARPS: tl.constexpr):
    """Which loaded row stands at the tile's row i."""
    chunk: tl.constexpr = 16 * WARPS
    return i // chunk * chunk + i // 8 % 2 * (8 * WARPS) + i // 16 % WARPS * 8 + i % 8


# Pairs of columns that a thread of an mma holds side by side: Triton's choice. Another one costs shuffles, no more.
MMA_SIDE = 2 if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8) else 1


@triton.constexpr_function
def side(tokens):
    """Pairs of columns side by side in a product of so many tokens: an mma's below 16, one in a wgmma."""
    return MMA_SIDE if tokens < 16 else 1


@triton.jit
def column(place, SIDE: tl.constexpr):
    """`moe_columns.order` of a place."""
    within = place % COLUMNS
    word = within % 32
    pair = word // (8 * SIDE) * SIDE + word % (2 * SIDE) // 2
    return place - within + word % (8 * SIDE) // (2 * SIDE) * 32 + pair * 8 + word % 2 * 4 + within // 32


@triton.jit
def in_order(x, ROWS: tl.constexpr, WARPS: tl.constexpr, SIDE: tl.constexpr):
    """A loaded tile [ROWS, 32] in a product's order."""
    parted = x.reshape([ROWS // (16 * WARPS), 2, WARPS, 8, 4, 4 // SIDE, SIDE, 2])
    return parted.permute([0, 2, 1, 3, 5, 4, 6, 7]).reshape([ROWS, 32])


@triton.jit
def spread(m, ROWS: tl.constexpr, WARPS: tl.constexpr, SIDE: tl.constexpr):
    """A multiplier a row and group [ROWS, 4] at every word of a tile in a product's order."""
    parted = m.reshape([ROWS // (16 * WARPS), 2, WARPS, 8, 1, 4, 1]).permute([0, 2, 1, 3, 4, 5, 6])
    return parted.broadcast_to([ROWS // (16 * WARPS), WARPS, 2, 8, 4 // SIDE, 4, 2 * SIDE]).reshape([ROWS, 32])


@triton.jit
def _value(code):
    """fp32 of an E2M1 code, in plain arithmetic."""
    exponent = (code >> 1) & 3
    mantissa = code & 1
    doubled = tl.where(exponent == 0, mantissa, (2 + mantissa) << tl.maximum(exponent - 1, 0))
    size = doubled.to(tl.float32) * 0.5
    return tl.where((code & 8) != 0, -size, size)


@triton.jit
def unpack(packed, scale, ROWS: tl.constexpr, WARPS: tl.constexpr, SIDE: tl.constexpr, LOW: tl.constexpr):
    """Weights times 2^-DOWN [ROWS, 128] in a product's order, from words [ROWS, 32] and scale bytes [ROWS, 4]."""
    w = in_order(packed, ROWS, WARPS, SIDE)
    if LOW.is_bf16():
        pair = (tl.minimum(scale.to(tl.int32) + (126 - DOWN), 255) << 7) * 0x10001
        n0, n1, n2, n3 = tl.inline_asm_elementwise(
            UNPACK,
            "=r,=r,=r,=r,r,r,r",
            [w, spread(pair, ROWS, WARPS, SIDE)],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        m = spread(tl.exp2((scale.to(tl.int32) - (127 + DOWN)).to(tl.float32)), ROWS, WARPS, SIDE)
        code = w.to(tl.int32)
        n0 = _value(code & 15) * m
        n1 = _value((code >> 4) & 15) * m
        n2 = _value((code >> 8) & 15) * m
        n3 = _value((code >> 12) & 15) * m
    return tl.join(tl.join(n0, n1), tl.join(n2, n3)).permute([0, 3, 2, 1]).reshape([ROWS, 128])

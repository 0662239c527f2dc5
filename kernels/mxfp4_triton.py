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
BYTES = tl.constexpr(64)
GROUPS = tl.constexpr(4)

# $4: four packed bytes; $5: the multiplier twice, bf16. $0, $1: their low nibbles' weights; $2, $3: their high ones'.
# Two nibbles 16 bits apart go together; where a shift would need two masks, one multiplication makes both copies.
UNPACK = tl.constexpr("""
{
.reg .b32 q, a, b, c, d, t;
prmt.b32 q, $4, 0, 0x3120;
and.b32 a, q, 0x000F000F;
mul.lo.u32 a, a, 0x1040;
and.b32 a, a, 0x81C081C0;
and.b32 b, q, 0x00F000F0;
mul.lo.u32 b, b, 0x104;
and.b32 b, b, 0x81C081C0;
shr.u32 t, q, 2;
and.b32 t, t, 0x01C001C0;
shl.b32 c, q, 4;
and.b32 c, c, 0x80008000;
or.b32 c, c, t;
shr.u32 t, q, 6;
and.b32 t, t, 0x01C001C0;
and.b32 d, q, 0x80008000;
or.b32 d, d, t;
mul.bf16x2 $0, a, $5;
mul.bf16x2 $1, c, $5;
mul.bf16x2 $2, b, $5;
mul.bf16x2 $3, d, $5;
}
""")


@triton.jit
def row_order(i, WARPS: tl.constexpr):
    """Which loaded row stands at the tile's row i."""
    chunk: tl.constexpr = 16 * WARPS
    return i // chunk * chunk + i // 8 % 2 * (8 * WARPS) + i // 16 % WARPS * 8 + i % 8


@triton.jit
def in_order(x, ROWS: tl.constexpr, WARPS: tl.constexpr, PAIRS: tl.constexpr):
    """A loaded tile [ROWS, 4 * 2 PAIRS] in a product's order."""
    parted = x.reshape([ROWS // (16 * WARPS), 2, WARPS, 8, 4, PAIRS, 2])
    return parted.permute([0, 2, 1, 3, 5, 4, 6]).reshape([ROWS, 8 * PAIRS])


@triton.jit
def spread(m, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """A multiplier a row and group [ROWS, 4] at every byte of a tile in a product's order."""
    parted = m.reshape([ROWS // (16 * WARPS), 2, WARPS, 8, 1, 4, 1]).permute([0, 2, 1, 3, 4, 5, 6])
    return parted.broadcast_to([ROWS // (16 * WARPS), WARPS, 2, 8, 8, 4, 2]).reshape([ROWS, 64])


@triton.jit
def _value(code):
    """fp32 of an E2M1 code, in plain arithmetic."""
    exponent = (code >> 1) & 3
    mantissa = code & 1
    doubled = tl.where(exponent == 0, mantissa, (2 + mantissa) << tl.maximum(exponent - 1, 0))
    size = doubled.to(tl.float32) * 0.5
    return tl.where((code & 8) != 0, -size, size)


@triton.jit
def unpack(packed, scale, ROWS: tl.constexpr, WARPS: tl.constexpr, LOW: tl.constexpr):
    """Weights times 2^-DOWN [ROWS, 128] in a product's order, from bytes [ROWS, 64] and scale bytes [ROWS, 4]."""
    w = in_order(packed, ROWS, WARPS, 8)
    if LOW.is_bf16():
        pair = (tl.minimum(scale.to(tl.int32) + (126 - DOWN), 255) << 7) * 0x10001
        low, high = tl.inline_asm_elementwise(
            UNPACK,
            "=r,=r,=r,=r,r,r,r,r,r",
            [w, spread(pair, ROWS, WARPS)],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        m = spread(tl.exp2((scale.to(tl.int32) - (127 + DOWN)).to(tl.float32)), ROWS, WARPS)
        low = _value(w.to(tl.int32) & 15) * m
        high = _value(w.to(tl.int32) >> 4) * m
    return tl.join(low, high).permute([0, 2, 1]).reshape([ROWS, 128])

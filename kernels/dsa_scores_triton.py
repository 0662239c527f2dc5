"""Index scores on pages of fp8 keys: every key against all index heads of a few queries.

score(t, s) = scale_s sum_j weight_tj relu(q_tj . k_s): the keys are the rows of the product, so that a tile of them
goes from memory to the tensor cores as it lies, and the sum over heads stays within a warp. A key's scale is positive
and passes the relu. Query scales and the model's factors are in the weights.

Hopper's products of fp8 keep about 14 bits of their sums; in fp16, which holds every fp8 number, products and sums are
as good as fp32's (HALF).
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

import triton
import triton.language as tl


@triton.jit
def scores_kernel(
    q, weights, codes, scales, table, lengths, out, T, PER, table_row, page_bytes, out_row,
    H: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
    GROUP: tl.constexpr, HALF: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (part, block of QUERIES queries of one sequence): q [T, H, D] fp8, weights [T, H] fp32; pages as
    `dsa_keys_triton.write_keys_kernel` leaves them; table [T / PER, pages] int32; lengths [T] int32: keys that t sees.
    out [T, ..] fp32 with a row stride, written as far as each length.
    """
    part = tl.program_id(0)
    t = tl.program_id(1).to(tl.int64) * QUERIES + tl.arange(0, QUERIES)
    first = tl.program_id(1).to(tl.int64) * QUERIES
    heads = first * H + tl.arange(0, QUERIES * H)
    d = tl.arange(0, D)
    j = tl.arange(0, TILE)
    some = heads < T * H
    queries = tl.trans(tl.load(q + heads[:, None] * D + d[None, :], mask=some[:, None], other=0.0))
    if HALF:
        queries = queries.to(tl.float16)
    weight = tl.load(weights + heads, mask=some, other=0.0)
    length = tl.load(lengths + t, mask=t < T, other=0)
    tiles = tl.cdiv(tl.max(length, 0), TILE)
    each = tl.cdiv(tiles, tl.num_programs(0))
    pages = table + first // PER * table_row
    inside = j // GROUP * (GROUP * (D + 4)) + j % GROUP * D
    scale_inside = (j // GROUP * (GROUP * (D + 4)) + GROUP * D) // 4 + j % GROUP
    for tile in tl.range(part * each, tl.minimum((part + 1) * each, tiles), num_stages=STAGES):
        token = tile * TILE
        at = tl.load(pages + token // PAGE).to(tl.int64) * page_bytes + token % PAGE // GROUP * (GROUP * (D + 4))
        keys = tl.load(codes + at + inside[:, None] + d[None, :])
        scale = tl.load(scales + at // 4 + scale_inside)
        if HALF:
            keys = keys.to(tl.float16)
        x = tl.maximum(tl.dot(keys, queries), 0.0) * weight[None, :]
        score = tl.sum(tl.reshape(x, (TILE, QUERIES, H)), 2) * scale[:, None]
        seen = (token + j)[:, None] < length[None, :]
        tl.store(out + t[None, :] * out_row + (token + j)[:, None], score, mask=seen)

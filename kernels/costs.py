"""Bytes, FLOPs and parameters of a model, computed from its shape. One multiply-add counts as two FLOPs.

Caches are counted as released serving keeps them: latent rows, convolution tails and weights in bf16, recurrent
matrices in fp32 where not said otherwise.
"""

from dataclasses import dataclass
from typing import NamedTuple

from forebay.kernels.shapes import ModelShape

BF16, FP32 = 2, 4
FP8_SCALE_BYTES = 4
MXFP4_GROUP = 32
MIB, GIB = 1 << 20, 1 << 30
MILLION = 1_000_000


def latent_row_bytes(shape: ModelShape, dtype_bytes: int = BF16) -> int:
    """One token's latent row in one global layer; every tensor-parallel rank holds it whole."""
    return shape.mla.row_elements * dtype_bytes


def index_row_bytes(shape: ModelShape) -> int | None:
    """One token's index key in one global layer, an fp8 key's scale included; None where the model has no indexer."""
    if shape.index is None:
        return None
    dim = shape.index.head_dim
    return dim + FP8_SCALE_BYTES if shape.index.key_dtype == "fp8" else dim * FP32


def matrix_bytes(shape: ModelShape, tp: int = 1, dtype_bytes: int = FP32) -> int:
    """One KDA layer's recurrent matrices of one sequence, on one of `tp` ranks."""
    assert shape.kda.heads % tp == 0, "heads divide over the ranks"
    return shape.kda.heads // tp * shape.kda.head_dim**2 * dtype_bytes


def tail_bytes(shape: ModelShape, tp: int = 1, dtype_bytes: int = BF16) -> int:
    """One KDA layer's convolution tail (the last inputs of q, k and v) of one sequence, on one of `tp` ranks."""
    assert shape.kda.heads % tp == 0, "heads divide over the ranks"
    return (shape.kda.conv_width - 1) * 3 * shape.kda.width // tp * dtype_bytes


def state_bytes(shape: ModelShape, tp: int = 1, matrix_dtype_bytes: int = FP32, tail_dtype_bytes: int = BF16) -> int:
    """One KDA layer's whole state of one sequence, on one of `tp` ranks: matrices, then the tail."""
    return matrix_bytes(shape, tp, matrix_dtype_bytes) + tail_bytes(shape, tp, tail_dtype_bytes)


def index_flops(shape: ModelShape, tokens: int) -> int:
    """Scoring `tokens` index keys for one new token, all global layers."""
    assert shape.index is not None, "the model has an indexer"
    return 2 * shape.index.heads * shape.index.head_dim * len(shape.global_layers) * tokens


def dense_attention_flops(shape: ModelShape, tokens: int) -> int:
    """Un-absorbed attention of one new token to `tokens` rows, all global layers."""
    mla = shape.mla
    return 2 * mla.heads * (mla.query_dim + mla.value_dim) * len(shape.global_layers) * tokens


def absorbed_attention_flops(shape: ModelShape, tokens: int) -> int:
    """The same in latent space: every head over whole latent rows."""
    mla = shape.mla
    return 2 * mla.heads * (mla.row_elements + mla.kv_rank) * len(shape.global_layers) * tokens


def kda_flops(shape: ModelShape, chunk: int = 64) -> int:
    """The chunked operator for one token, all KDA layers (Kimi Linear technical report, equation 13)."""
    dim = shape.kda.head_dim
    return shape.kda.heads * (6 * dim**2 + 3 * chunk * dim + chunk**2) * len(shape.kda_layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Element counts. `active` is what one token's forward pass multiplies by: no embedding table, but the output
    head.
    """

    experts: int
    total: int
    active: int


def parameters(shape: ModelShape) -> Parameters:
    """Counted tensor by tensor, as the released checkpoints have them."""
    moe_layers = shape.layers - shape.dense_layers
    expert = 3 * (shape.moe.latent or shape.hidden) * shape.moe.width
    experts = moe_layers * shape.moe.experts * expert
    embedding = shape.vocab * shape.hidden
    residual = 0 if shape.attn_res_block is None else 2 * shape.hidden
    others = (
        embedding
        + shape.hidden
        + residual
        + shape.layers * 2 * (shape.hidden + residual)
        + shape.dense_layers * 3 * shape.hidden * shape.dense_width
        + moe_layers * moe_parameters(shape)
        + len(shape.kda_layers) * kda_parameters(shape)
        + len(shape.global_layers) * global_parameters(shape)
    )
    used = moe_layers * shape.moe.per_token * expert
    return Parameters(experts=experts, total=embedding + others + experts, active=others + used)


def kda_parameters(shape: ModelShape) -> int:
    """A KDA layer's attention."""
    kda, hidden = shape.kda, shape.hidden
    gate = kda.width * hidden if kda.full_rank_out_gate else kda.head_dim * (hidden + kda.width)
    decay = kda.gate_rank * (hidden + kda.width) + kda.heads + kda.width
    return 4 * kda.width * hidden + 3 * kda.width * kda.conv_width + decay + kda.heads * hidden + gate + kda.head_dim


def global_parameters(shape: ModelShape) -> int:
    """A global layer's attention."""
    mla, index, hidden = shape.mla, shape.index, shape.hidden
    queries, values = mla.heads * mla.query_dim, mla.heads * mla.value_dim
    query = queries * hidden if mla.q_rank is None else mla.q_rank * (hidden + 1 + queries)
    latent = mla.row_elements * hidden + mla.kv_rank * (1 + mla.heads * (mla.nope_dim + mla.value_dim))
    gated = values * hidden * (2 if mla.out_gate else 1)
    if index is None:
        return query + latent + gated
    keys = index.head_dim * (hidden + 2) + index.heads * hidden
    return query + latent + gated + keys + index.heads * index.head_dim * (mla.q_rank or hidden)


def moe_parameters(shape: ModelShape) -> int:
    """A MoE layer without its routed experts."""
    moe, hidden = shape.moe, shape.hidden
    latent = 0 if moe.latent is None else 2 * moe.latent * hidden + (moe.latent if moe.latent_norm else 0)
    return moe.experts * (hidden + 1) + 3 * hidden * moe.shared_width + latent


def expert_bytes(shape: ModelShape) -> int:
    """All routed experts as they are kept."""
    elements = parameters(shape).experts
    return elements // 2 + elements // MXFP4_GROUP if shape.moe.expert_format == "mxfp4" else elements * BF16


class Row(NamedTuple):
    """One line of a description."""

    name: str
    value: float
    unit: str
    note: str


def describe(shape: ModelShape) -> list[Row]:
    """What a user asks of a shape before buying memory. Page sizes follow from `state_bytes` and `latent_row_bytes`."""
    return [
        *_census(shape),
        *_cache(shape),
        *([] if shape.index is None else _sparse(shape)),
        *([] if shape.attn_res_block is None else _residuals(shape)),
        *_weights(shape),
    ]


def _census(shape: ModelShape) -> list[Row]:
    kda, global_ = len(shape.kda_layers), len(shape.global_layers)
    moe = shape.layers - shape.dense_layers
    return [
        Row("layers", shape.layers, "layers", f"{kda} KDA + {global_} global"),
        Row("KDA layers", kda, "layers", f"{shape.kda.heads} heads of {shape.kda.head_dim}"),
        Row("global layers", global_, "layers", "latent attention" + (", sparse" if shape.index else ", dense")),
        Row("MoE layers", moe, "layers", f"{shape.dense_layers} dense before them"),
        Row(
            "experts per chosen expert", shape.moe.experts / shape.moe.per_token, "×", "sparsity of the routed experts"
        ),
    ]


def _cache(shape: ModelShape) -> list[Row]:
    kda, global_ = len(shape.kda_layers), len(shape.global_layers)
    bf16, fp32 = kda * matrix_bytes(shape, dtype_bytes=BF16), kda * matrix_bytes(shape)
    row = latent_row_bytes(shape)
    token = global_ * row
    return [
        Row("state, bf16", bf16 / MIB, "MiB/sequence", "recurrent matrices of all KDA layers"),
        Row("state, fp32", fp32 / MIB, "MiB/sequence", "the same in fp32"),
        Row("convolution tails, bf16", kda * tail_bytes(shape) / MIB, "MiB/sequence", "beside either"),
        Row("latent row, bf16", row, "B/token/layer", f"{shape.mla.kv_rank} + {shape.mla.pe_dim} elements"),
        Row("latent rows", token, "B/token", f"{global_} global layers"),
        Row("latent rows at 1,000,000 tokens", token * MILLION / 1e9, "GB", "grows with the context"),
        Row("latent rows at 2^20 tokens", token * (1 << 20) / GIB, "GiB", "grows with the context"),
        Row(
            "break-even of a state",
            bf16 / (kda * row),
            "tokens",
            "bf16 state against latent rows in the KDA layers' place",
        ),
        Row("break-even against the real cache", bf16 / token, "tokens", "bf16 state against the global layers' rows"),
        Row("KDA operator", kda_flops(shape) / 1e9, "GFLOP/token", "chunked form, chunks of 64"),
        Row(
            "dense attention at 1,000,000 tokens",
            dense_attention_flops(shape, MILLION) / 1e12,
            "TFLOP/token",
            "un-absorbed",
        ),
        Row("the same, absorbed", absorbed_attention_flops(shape, MILLION) / 1e12, "TFLOP/token", "latent space"),
    ]


def _sparse(shape: ModelShape) -> list[Row]:
    index, key = shape.index, index_row_bytes(shape)
    assert index is not None
    assert key is not None
    global_ = len(shape.global_layers)
    read = global_ * index.top_k * latent_row_bytes(shape)
    codes = global_ * index.head_dim * (1 if index.key_dtype == "fp8" else FP32)
    less = global_ * latent_row_bytes(shape) * MILLION / read
    saved = dense_attention_flops(shape, MILLION) / index_flops(shape, MILLION)
    return [
        Row("latent rows read", read / 1e6, "MB/token", f"the {index.top_k} chosen, at any length"),
        Row("the same against a dense read", less, "× less", "at 1,000,000 tokens"),
        Row("index keys", codes / 1024, "KiB/token", f"{index.key_dtype}, without scales"),
        Row("index keys at 1,000,000 tokens", codes * MILLION / 1e9, "GB", "without scales"),
        Row("index keys with scales", global_ * key * MILLION / 1e9, "GB", f"at 1,000,000 tokens, {key} B a key"),
        Row("indexer at 1,000,000 tokens", index_flops(shape, MILLION) / 1e9, "GFLOP/token", "scores of all keys"),
        Row("dense attention against the indexer", saved, "×", "FLOPs at 1,000,000 tokens"),
    ]


def _residuals(shape: ModelShape) -> list[Row]:
    assert shape.attn_res_block is not None
    blocks = -(-shape.layers // shape.attn_res_block)
    note = f"bank of {blocks} blocks and the running prefix, {shape.hidden} wide, bf16"
    return [
        Row("block representations", (blocks + 1) * shape.hidden * BF16 / 1024, "KiB/token", note),
        Row("residual mixes", 2 * shape.layers + 1, "mixes", "two a layer and one before the head"),
        Row(
            "layers in the last block",
            shape.layers - (blocks - 1) * shape.attn_res_block,
            "layers",
            f"of {shape.attn_res_block} in a full one",
        ),
    ]


def _weights(shape: ModelShape) -> list[Row]:
    count = parameters(shape)
    return [
        Row("parameters", count.total / 1e12, "T", "text model"),
        Row("active parameters", count.active / 1e9, "G/token", "with the output head, without the embedding table"),
        Row("routed experts", expert_bytes(shape) / 1e12, "TB", shape.moe.expert_format),
        Row("all other weights, bf16", (count.total - count.experts) * BF16 / 1e9, "GB", "text model"),
    ]

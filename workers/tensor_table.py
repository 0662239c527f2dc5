"""Which tensors a checkpoint of a given `ModelShape` holds: names as released (without the `language_model.` prefix),
shapes [out, in], and what stands beside them that is known and not used.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from forebay.kernels.shapes import ModelShape

FLOATS = ("F32", "BF16", "F16")
BYTES = ("U8",)
MXFP4_GROUP = 32

# Not published for K3.1: the names of public checkpoints with the same indexer. role -> name below self_attn.
INDEXER_NAMES = {
    "query": "indexer.wq_b.weight",
    "key": "indexer.wk.weight",
    "key_norm_weight": "indexer.k_norm.weight",
    "key_norm_bias": "indexer.k_norm.bias",
    "head_weights": "indexer.weights_proj.weight",
}

# Parts of a released multimodal checkpoint that its text model never reads.
VISION = ("vision_tower.", "mm_projector.")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One expected tensor: any of `shapes`, any of `dtypes` (safetensors names), under its name or one of `aliases`."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...] = FLOATS
    aliases: tuple[str, ...] = ()


def expected_tensors(shape: ModelShape) -> dict[str, TensorSpec]:
    """Every tensor of the text model by its name."""
    table = dict(_outer(shape))
    for layer in range(shape.layers):
        for name, spec in _layer(shape, layer):
            aliases = tuple(f"model.layers.{layer}.{alias}" for alias in spec.aliases)
            table[f"model.layers.{layer}.{name}"] = TensorSpec(spec.shapes, spec.dtypes, aliases)
    return table


def unused_part(name: str, shape: ModelShape, mtp_layers: int) -> str | None:
    """The part of a released checkpoint that `name` belongs to, where the text model does not use that part."""
    if name.startswith(VISION):
        return "vision"
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer is None:
        return None
    if shape.layers <= int(layer[1]) < shape.layers + mtp_layers:
        return "MTP"
    is_indexer = name.removeprefix(layer[0]).removeprefix("self_attn.") in INDEXER_NAMES.values()
    return "indexer" if shape.index is None and is_indexer else None


Specs = Iterator[tuple[str, TensorSpec]]


def _spec(*dims: int) -> TensorSpec:
    return TensorSpec((dims,))


def _outer(shape: ModelShape) -> Specs:
    yield "model.embed_tokens.weight", _spec(shape.vocab, shape.hidden)
    yield "lm_head.weight", _spec(shape.vocab, shape.hidden)
    yield "model.norm.weight", _spec(shape.hidden)
    if shape.attn_res_block is not None:
        yield from _residual(shape, "model.output_attn")


def _residual(shape: ModelShape, consumer: str) -> Specs:
    yield f"{consumer}_res_norm.weight", _spec(shape.hidden)
    yield f"{consumer}_res_proj.weight", _spec(1, shape.hidden)


def _layer(shape: ModelShape, layer: int) -> Specs:
    yield "input_layernorm.weight", _spec(shape.hidden)
    yield "post_attention_layernorm.weight", _spec(shape.hidden)
    if shape.attn_res_block is not None:
        yield from _residual(shape, "self_attention")
        yield from _residual(shape, "mlp")
    for name, spec in _global(shape) if layer in shape.global_layers else _kda(shape):
        yield f"self_attn.{name}", spec
    yield from _dense(shape) if layer < shape.dense_layers else _moe(shape)


def _kda(shape: ModelShape) -> Specs:
    kda, hidden = shape.kda, shape.hidden
    for letter in "qkv":
        yield f"{letter}_proj.weight", _spec(kda.width, hidden)
        yield f"{letter}_conv1d.weight", _spec(kda.width, 1, kda.conv_width)
    padded = -(-kda.heads // 128) * 128
    yield "A_log", TensorSpec(((kda.heads,), (padded,), (1, 1, kda.heads, 1)))
    yield "dt_bias", _spec(kda.width)
    yield "f_a_proj.weight", _spec(kda.gate_rank, hidden)
    yield "f_b_proj.weight", _spec(kda.width, kda.gate_rank)
    yield "b_proj.weight", _spec(kda.heads, hidden)
    yield "o_norm.weight", _spec(kda.head_dim)
    if kda.full_rank_out_gate:
        yield "g_proj.weight", _spec(kda.width, hidden)
    else:
        yield "g_a_proj.weight", _spec(kda.head_dim, hidden)
        yield "g_b_proj.weight", _spec(kda.width, kda.head_dim)
    yield "o_proj.weight", _spec(hidden, kda.width)


def _global(shape: ModelShape) -> Specs:
    mla, hidden = shape.mla, shape.hidden
    if mla.q_rank is None:
        yield "q_proj.weight", _spec(mla.heads * mla.query_dim, hidden)
    else:
        yield "q_a_proj.weight", _spec(mla.q_rank, hidden)
        yield "q_a_layernorm.weight", _spec(mla.q_rank)
        yield "q_b_proj.weight", _spec(mla.heads * mla.query_dim, mla.q_rank)
    yield "kv_a_proj_with_mqa.weight", _spec(mla.row_elements, hidden)
    yield "kv_a_layernorm.weight", _spec(mla.kv_rank)
    yield "kv_b_proj.weight", _spec(mla.heads * (mla.nope_dim + mla.value_dim), mla.kv_rank)
    if mla.out_gate:
        yield "g_proj.weight", _spec(mla.heads * mla.value_dim, hidden)
    yield "o_proj.weight", _spec(hidden, mla.heads * mla.value_dim)
    if shape.index is not None:
        yield from _indexer(shape)


def _indexer(shape: ModelShape) -> Specs:
    index, q_rank = shape.index, shape.mla.q_rank
    assert index is not None
    assert q_rank is not None
    yield INDEXER_NAMES["query"], _spec(index.heads * index.head_dim, q_rank)
    yield INDEXER_NAMES["key"], _spec(index.head_dim, shape.hidden)
    yield INDEXER_NAMES["key_norm_weight"], _spec(index.head_dim)
    yield INDEXER_NAMES["key_norm_bias"], _spec(index.head_dim)
    yield INDEXER_NAMES["head_weights"], _spec(index.heads, shape.hidden)


def _dense(shape: ModelShape) -> Specs:
    """Released as `mlp.*`; transformers writes the same tensors as `block_sparse_moe.*`."""
    up, down = (shape.dense_width, shape.hidden), (shape.hidden, shape.dense_width)
    for name, dims in (("gate_proj", up), ("up_proj", up), ("down_proj", down)):
        yield f"mlp.{name}.weight", TensorSpec((dims,), aliases=(f"block_sparse_moe.{name}.weight",))


def _moe(shape: ModelShape) -> Specs:
    moe, hidden = shape.moe, shape.hidden
    yield "block_sparse_moe.gate.weight", _spec(moe.experts, hidden)
    yield "block_sparse_moe.gate.e_score_correction_bias", _spec(moe.experts)
    if moe.latent is not None:
        yield "block_sparse_moe.routed_expert_down_proj.weight", _spec(moe.latent, hidden)
        yield "block_sparse_moe.routed_expert_up_proj.weight", _spec(hidden, moe.latent)
    if moe.latent_norm:
        yield "block_sparse_moe.routed_expert_norm.weight", _spec(moe.latent or hidden)
    for name in ("gate_proj", "up_proj"):
        yield f"block_sparse_moe.shared_experts.{name}.weight", _spec(moe.shared_width, hidden)
    yield "block_sparse_moe.shared_experts.down_proj.weight", _spec(hidden, moe.shared_width)
    for expert in range(moe.experts):
        yield from _expert(shape, f"block_sparse_moe.experts.{expert}")


def _expert(shape: ModelShape, expert: str) -> Specs:
    latent, width = shape.moe.latent or shape.hidden, shape.moe.width
    for name, out, into in (("w1", width, latent), ("w3", width, latent), ("w2", latent, width)):
        if shape.moe.expert_format == "plain":
            yield f"{expert}.{name}.weight", _spec(out, into)
        else:
            yield f"{expert}.{name}.weight_packed", TensorSpec(((out, into // 2),), BYTES)
            yield f"{expert}.{name}.weight_scale", TensorSpec(((out, into // MXFP4_GROUP),), BYTES)

"""The frozen table of released shapes, by name. Facts from the released config files, and for K3.1 Pro, whose
vocabulary and dense width are not published, from its model card with K3's values in their place."""

from dataclasses import replace
from types import MappingProxyType

from forebay.kernels.shapes import IndexShape, KdaShape, MlaShape, ModelShape, MoeShape

KIMI_LINEAR_48B = ModelShape(
    name="kimi-linear-48b",
    layers=27,
    hidden=2304,
    vocab=163_840,
    dense_width=9216,
    dense_layers=1,
    global_layers=(3, 7, 11, 15, 19, 23, 26),
    kda=KdaShape(heads=32, head_dim=128, gate="softplus", gate_rank=128, full_rank_out_gate=False),
    mla=MlaShape(heads=32, q_rank=None, kv_rank=512, nope_dim=128, pe_dim=64, value_dim=128, out_gate=False),
    index=None,
    moe=MoeShape(
        experts=256, per_token=8, width=1024, shared_width=1024, latent=None, latent_norm=False, scaling=2.446
    ),
    activation="silu",
    attn_res_block=None,
    context_tokens=1 << 20,
    bos_id=163_584,
    eos_id=163_586,
    pad_id=163_839,
)

K3 = ModelShape(
    name="k3",
    layers=93,
    hidden=7168,
    vocab=163_840,
    dense_width=33_792,
    dense_layers=1,
    global_layers=(*range(3, 92, 4), 92),
    kda=KdaShape(heads=96, head_dim=128, gate_rank=128, full_rank_out_gate=True),
    mla=MlaShape(heads=96, q_rank=1536, kv_rank=512, nope_dim=128, pe_dim=64, value_dim=128, out_gate=True),
    index=None,
    moe=MoeShape(
        experts=896,
        per_token=16,
        width=3072,
        shared_width=6144,
        latent=3584,
        latent_norm=True,
        scaling=1.0,
        expert_format="mxfp4",
    ),
    activation="situ",
    attn_res_block=12,
    context_tokens=1 << 20,
    bos_id=163_584,
    eos_id=163_586,
    pad_id=163_839,
)

K3_1_PRO = replace(K3, name="k3.1-pro", index=IndexShape(heads=32, head_dim=128, top_k=2048, key_dtype="fp8"))


def rank_slice(shape: ModelShape, *, name: str, ranks: int, layers: int) -> ModelShape:
    """The first `layers` layers as one of `ranks` tensor-parallel ranks has them: its heads, its share of the width of
    every expert and dense layer, and of the vocabulary. Latents, routers and index heads are whole on every rank.

    As a model it is whole again: what a rank would add up with the others is simply its own part.
    """
    assert shape.kda.heads % ranks == shape.mla.heads % ranks == shape.moe.width % ranks == shape.vocab % ranks == 0
    vocab = shape.vocab // ranks
    return replace(
        shape,
        name=name,
        layers=layers,
        global_layers=tuple(layer for layer in shape.global_layers if layer < layers),
        dense_width=shape.dense_width // ranks,
        kda=replace(shape.kda, heads=shape.kda.heads // ranks),
        mla=replace(shape.mla, heads=shape.mla.heads // ranks),
        moe=replace(shape.moe, width=shape.moe.width // ranks, shared_width=shape.moe.shared_width // ranks),
        vocab=vocab,
        bos_id=vocab - 3,
        eos_id=vocab - 2,
        pad_id=vocab - 1,
    )


K3_1_SLICE = rank_slice(K3_1_PRO, name="k3.1-slice", ranks=8, layers=52)

SHAPES = MappingProxyType({shape.name: shape for shape in (KIMI_LINEAR_48B, K3, K3_1_PRO, K3_1_SLICE)})

"""config.json of a Hugging Face folder -> `ModelShape`, for Kimi Linear, Kimi K3 and K3.1 (K3 with `dsa_config`).

Every field is either read, required to have the one value that is served, or listed as without effect on the
text model (`config_fields`); the first trouble is one `FolderError` that names the fields.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.kernels.shapes import (
    Activation,
    ExpertFormat,
    IndexShape,
    KdaShape,
    KeyDtype,
    MlaShape,
    ModelShape,
    MoeShape,
)
from forebay.workers.config_fields import (
    DSA_SPELLINGS,
    FIXED,
    LINEAR_READ,
    OUTER,
    READ,
    WITHOUT_EFFECT,
    Fields,
    FolderError,
    refuse_unknown,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderConfig:
    """What config.json says: the text model's shape, and how many MTP layers follow it in the checkpoint."""

    shape: ModelShape
    mtp_layers: int


def read_config(folder: Path) -> FolderConfig:
    """`folder`/config.json as a shape. FolderError where it is missing, broken, or asks for what is not served."""
    path = folder / "config.json"
    if not path.is_file():
        raise FolderError(f"{folder}: no config.json: not a model folder")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise FolderError(f"{path}: cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise FolderError(f"{path}: is not a JSON object")
    try:
        return parse_config(config)
    except FolderError as error:
        raise FolderError(f"{path}: {error}") from None


def parse_config(config: Mapping[str, Any]) -> FolderConfig:
    """As `read_config`, from the parsed object."""
    text = _text_fields(config)
    refuse_unknown(text, READ | WITHOUT_EFFECT | FIXED.keys(), "")
    wrong = [f"{name}={text[name]!r}" for name, served in FIXED.items() if name in text and text[name] not in served]
    if wrong:
        raise FolderError(f"unsupported value: {', '.join(wrong)}")
    fields = Fields(text, "")
    shape = _shape(fields, _linear(fields))
    _check_derived(fields, shape)
    return FolderConfig(shape=shape, mtp_layers=fields.integer("num_nextn_predict_layers", 0, least=0))


def _text_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's fields; ids and quantisation of the outer level fill in where the inner level is silent."""
    inner = config.get("text_config")
    if inner is None:
        return dict(config)
    if not isinstance(inner, Mapping):
        raise FolderError("text_config is not an object")
    refuse_unknown(config, OUTER | READ | WITHOUT_EFFECT | FIXED.keys(), "")
    return {name: value for name, value in config.items() if name not in OUTER} | dict(inner)


def _linear(text: Fields) -> Fields:
    linear = text.inner("linear_attn_config")
    refuse_unknown(linear.found, LINEAR_READ, linear.inside)
    return linear


def _shape(text: Fields, linear: Fields) -> ModelShape:
    index, index_layers = _index(text)
    block = text.optional("attn_res_block_size")
    eps = text.number("rms_norm_eps")
    return ModelShape(
        name="kimi-linear" if block is None else "k3" if index is None else "k3.1",
        layers=text.integer("num_hidden_layers"),
        hidden=text.integer("hidden_size"),
        vocab=text.integer("vocab_size"),
        dense_width=text.integer("intermediate_size"),
        dense_layers=text.integer("first_k_dense_replace", 0, least=0),
        global_layers=_global_layers(text, linear, index_layers),
        kda=_kda(linear),
        mla=_mla(text),
        index=index,
        moe=_moe(text),
        activation=_activation(text),
        situ_beta=text.number("activation_situ_beta", 4.0),
        situ_linear_beta=text.number("activation_situ_linear_beta", 25.0),
        attn_res_block=block,
        norm_eps=eps,
        latent_norm_eps=eps,
        context_tokens=_context(text),
        bos_id=text.integer("bos_token_id", least=0),
        eos_id=_eos(text),
        pad_id=text.integer("pad_token_id", least=0),
    )


def _kda(linear: Fields) -> KdaShape:
    head_dim = linear.integer("head_dim")
    bounded = linear.found.get("gate_lower_bound") is not None
    return KdaShape(
        heads=linear.integer("num_heads"),
        head_dim=head_dim,
        conv_width=linear.integer("short_conv_kernel_size", 4, least=2),
        gate="bounded" if bounded else "softplus",
        gate_lower_bound=linear.number("gate_lower_bound") if bounded else -5.0,
        gate_rank=head_dim,
        full_rank_out_gate=linear.flag("use_full_rank_gate", False),
    )


def _mla(text: Fields) -> MlaShape:
    heads = text.integer("num_attention_heads")
    if text.integer("num_key_value_heads", heads) != heads:
        raise FolderError(f"num_key_value_heads must equal num_attention_heads ({heads}) in latent attention")
    return MlaShape(
        heads=heads,
        q_rank=text.optional("q_lora_rank"),
        kv_rank=text.integer("kv_lora_rank"),
        nope_dim=text.integer("qk_nope_head_dim"),
        pe_dim=text.integer("qk_rope_head_dim"),
        value_dim=text.integer("v_head_dim"),
        out_gate=text.flag("mla_use_output_gate", False),
    )


def _moe(text: Fields) -> MoeShape:
    width = text.integer("moe_intermediate_size")
    return MoeShape(
        experts=text.integer("num_experts"),
        per_token=text.integer("num_experts_per_token"),
        width=width,
        shared_width=width * text.integer("num_shared_experts"),
        latent=text.optional("routed_expert_hidden_size"),
        latent_norm=text.flag("latent_moe_use_norm", False),
        scaling=text.number("routed_scaling_factor", 1.0),
        renormalize=text.flag("moe_renormalize", True),
        expert_format=_expert_format(text),
    )


def _activation(text: Fields) -> Activation:
    name = text.found.get("hidden_act")
    if name == "silu":
        return "silu"
    if name == "situ":
        return "situ"
    raise FolderError(f"unsupported value: hidden_act={name!r} (served: silu, situ)")


def _expert_format(text: Fields) -> ExpertFormat:
    """compressed-tensors' mxfp4 packing (weights only, groups of 32, a byte of exponent each), or none."""
    if text.found.get("quantization_config") is None:
        return "plain"
    quant = text.inner("quantization_config")
    groups = quant.inner("config_groups").found.values()
    if quant.found.get("format") != "mxfp4-pack-quantized" or len(groups) != 1:
        raise FolderError(f"unsupported value: quantization_config.format={quant.found.get('format')!r}")
    group = Fields(next(iter(groups)), "quantization_config.config_groups.")
    weights = group.inner("weights").found
    served = {"num_bits": 4, "type": "float", "group_size": 32, "symmetric": True, "dynamic": False}
    wrong = [f"{name}={weights.get(name)!r}" for name, value in served.items() if weights.get(name, value) != value]
    wrong += [name for name in ("input_activations", "output_activations") if group.found.get(name) is not None]
    if wrong:
        raise FolderError(f"unsupported value in quantization_config: {', '.join(wrong)}")
    return "mxfp4"


def _index(text: Fields) -> tuple[IndexShape | None, tuple[int, ...] | None]:
    """The sparse indexer and the layers it names. `use_dsa: false` serves the same weights' layers densely."""
    if text.found.get("dsa_config") is None or not text.flag("use_dsa", True):
        return None, None
    dsa = text.inner("dsa_config")
    spelled = {name: [s for s in spellings if s in dsa.found] for name, spellings in DSA_SPELLINGS.items()}
    refuse_unknown(dsa.found, frozenset(s for names in DSA_SPELLINGS.values() for s in names), dsa.inside)
    twice = [names for names in spelled.values() if len(names) > 1]
    if twice:
        raise FolderError(f"dsa_config names one thing twice: {', '.join(twice[0])}")
    missing = [DSA_SPELLINGS[name][0] for name in ("head_dim", "heads", "top_k") if not spelled[name]]
    if missing:
        raise FolderError(f"dsa_config lacks {', '.join(missing)}")
    rope = spelled["rope_dim"]
    theta = spelled["rope_theta"]
    index = IndexShape(
        heads=dsa.integer(spelled["heads"][0]),
        head_dim=dsa.integer(spelled["head_dim"][0]),
        top_k=dsa.integer(spelled["top_k"][0]),
        rope_dim=dsa.integer(rope[0], least=0) if rope else 0,
        rope_theta=dsa.number(theta[0]) if theta else 10000.0,
        key_dtype=_key_dtype(dsa),
    )
    return index, dsa.layers("dsa_layers")


def _key_dtype(dsa: Fields) -> KeyDtype:
    name = dsa.found.get("index_key_dtype", "fp32")
    if name == "fp32":
        return "fp32"
    if name == "fp8":
        return "fp8"
    raise FolderError(f"unsupported value: dsa_config.index_key_dtype={name!r} (served: fp32, fp8)")


def _global_layers(text: Fields, linear: Fields, index_layers: tuple[int, ...] | None) -> tuple[int, ...]:
    """Global layers from whichever lists stand there (full_attn_layers, dsa_layers); they and kda_layers must agree."""
    lists = [linear.layers("full_attn_layers"), linear.layers("dsa_layers"), index_layers]
    named = {layers for layers in lists if layers is not None}
    everything = set(range(text.integer("num_hidden_layers")))
    kda = linear.layers("kda_layers")
    if kda is not None:
        named.add(tuple(sorted(everything - set(kda))))
    if len(named) != 1:
        raise FolderError(
            "linear_attn_config: kda_layers, full_attn_layers and dsa_layers "
            + ("disagree" if named else "are all missing")
        )
    layers = named.pop()
    if not layers or not set(layers) < everything:
        raise FolderError(f"linear_attn_config: global layers must be some of the {len(everything)} layers, not all")
    return layers


def _context(text: Fields) -> int:
    name = "max_position_embeddings" if "max_position_embeddings" in text.found else "model_max_length"
    return text.integer(name)


def _eos(text: Fields) -> int:
    """Where several ids end a turn, the first; generation_config.json's list is the router's matter."""
    value = text.found.get("eos_token_id")
    if isinstance(value, list) and value:
        return Fields({"eos_token_id": value[0]}, "").integer("eos_token_id", least=0)
    return text.integer("eos_token_id", least=0)


def _check_derived(text: Fields, shape: ModelShape) -> None:
    """Fields that say again what others say (transformers writes them) must say the same."""
    said = {
        "qk_head_dim": shape.mla.query_dim,
        "linear_conv_kernel_dim": shape.kda.conv_width,
        "linear_head_dim": shape.kda.head_dim,
        "linear_num_heads": shape.kda.heads,
        "layer_types": [
            "full_attention" if layer in shape.global_layers else "linear_attention" for layer in range(shape.layers)
        ],
        "mlp_layer_types": ["dense" if layer < shape.dense_layers else "sparse" for layer in range(shape.layers)],
    }
    wrong = [name for name, value in said.items() if text.found.get(name, value) != value]
    if wrong:
        raise FolderError(f"contradicts the fields it repeats: {', '.join(wrong)}")
    if shape.index is not None and shape.mla.q_rank is None:
        raise FolderError("dsa_config needs q_lora_rank: the indexer's queries come from the query latent")
    if shape.moe.per_token > shape.moe.experts:
        raise FolderError("num_experts_per_token is more than num_experts")

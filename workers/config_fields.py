"""The fields of config.json: which are read, which must have one value, which have no effect; and typed reads.

Anything that stands in none of the tables is an error that names it: a field that is silently ignored is a wrong
answer later.
"""

from collections.abc import Mapping
from typing import Any


class FolderError(ValueError):
    """A model folder that cannot be served. The message is one line that names what is wrong with it."""


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


# Fields whose only served value is the given one (a missing field means the same).
FIXED: dict[str, tuple[Any, ...]] = {
    "tie_word_embeddings": (False,),
    "attention_bias": (False,),
    "num_expert_group": (1, None),
    "topk_group": (1, None),
    "moe_layer_freq": (1,),
    "moe_router_activation_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "mla_use_nope": (True,),
    "rope_scaling": (None,),
    "pretraining_tp": (1,),
}

READ = _names(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads hidden_act "
    "rms_norm_eps max_position_embeddings model_max_length moe_intermediate_size moe_renormalize num_experts "
    "num_experts_per_token num_shared_experts routed_scaling_factor first_k_dense_replace routed_expert_hidden_size "
    "latent_moe_use_norm q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim "
    "mla_use_output_gate attn_res_block_size activation_situ_beta activation_situ_linear_beta "
    "num_nextn_predict_layers bos_token_id eos_token_id pad_token_id linear_attn_config dsa_config use_dsa "
    "quantization_config layer_types mlp_layer_types linear_conv_kernel_dim linear_head_dim linear_num_heads"
)

WITHOUT_EFFECT = _names(
    "architectures auto_map model_type dtype torch_dtype transformers_version use_cache initializer_range head_dim "
    "rope_theta rope_parameters attention_dropout output_router_logits use_grouped_topk aux_loss_alpha seq_aux "
    "_name_or_path return_dict output_attentions output_hidden_states is_encoder_decoder chunk_size_feed_forward "
    "id2label label2id problem_type"
)

# Of the outer config of a multimodal checkpoint; its text model stands in `text_config`.
OUTER = _names(
    "text_config vision_config ignore_index media_placeholder_token_id image_placeholder image_token_id "
    "use_unified_vision_chunk video_placeholder"
)

LINEAR_READ = _names(
    "head_dim num_heads short_conv_kernel_size kda_layers full_attn_layers dsa_layers use_full_rank_gate "
    "gate_lower_bound"
)

# K3.1's indexer fields are known from articles only: each is read under any of these spellings.
DSA_SPELLINGS: dict[str, tuple[str, ...]] = {
    "head_dim": ("index_head_dim",),
    "heads": ("index_num_heads", "index_n_heads"),
    "top_k": ("index_topk", "index_top_k", "top_k", "topk"),
    "rope_dim": ("index_rope_dim", "index_rope_head_dim"),
    "rope_theta": ("index_rope_theta", "rope_theta"),
    "layers": ("dsa_layers",),
    "key_dtype": ("index_key_dtype",),
}


def refuse_unknown(found: Mapping[str, Any], known: frozenset[str], inside: str) -> None:
    unknown = sorted(inside + name for name in found if name not in known)
    if unknown:
        raise FolderError(f"unknown field{'s' if len(unknown) > 1 else ''}: {', '.join(unknown)}")


class Fields:
    """Typed reads of one JSON object; `inside` prefixes the names in errors."""

    def __init__(self, found: Mapping[str, Any], inside: str) -> None:
        self.found, self.inside = found, inside

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self.found.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise FolderError(f"{self.inside}{name} must be an integer >= {least}, not {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.found.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise FolderError(f"{self.inside}{name} must be a number, not {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.found.get(name, default)
        if not isinstance(value, bool):
            raise FolderError(f"{self.inside}{name} must be true or false, not {value!r}")
        return value

    def optional(self, name: str) -> int | None:
        return None if self.found.get(name) is None else self.integer(name)

    def layers(self, name: str) -> tuple[int, ...] | None:
        """A 1-based list of layer numbers, as 0-based ones."""
        value = self.found.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(layer, int) and layer >= 1 for layer in value):
            raise FolderError(f"{self.inside}{name} must be a list of 1-based layer numbers")
        return tuple(sorted(layer - 1 for layer in value))

    def inner(self, name: str) -> "Fields":
        value = self.found.get(name)
        if not isinstance(value, Mapping):
            raise FolderError(f"{self.inside}{name} must be an object, not {value!r}")
        return Fields(value, f"{self.inside}{name}.")

"""config.json of the three families: what is read, and that whatever is not served is named."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from forebay.workers import demo
from forebay.workers.config_fields import FolderError
from forebay.workers.hf_config import parse_config, read_config

KIMI_LINEAR: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
    "vocab_size": 163840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 72,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "model_max_length": 1048576,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1024,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.446,
    "linear_attn_config": {
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [n for n in range(1, 28) if n not in (4, 8, 12, 16, 20, 24, 27)],
    },
}


def edited(config: dict[str, Any], edit: dict[str, Any], *path: str) -> dict[str, Any]:
    """A copy with fields set below `path`; None-valued keys named with a leading minus are removed."""
    copy = deepcopy(config)
    inner = copy
    for step in path:
        inner = inner[step]
    for name, value in edit.items():
        if name.startswith("-"):
            del inner[name[1:]]
        else:
            inner[name] = value
    return copy


def test_kimi_linear_has_softplus_gates_and_plain_residuals() -> None:
    shape = parse_config(KIMI_LINEAR).shape
    assert (shape.kda.gate, shape.kda.full_rank_out_gate, shape.attn_res_block) == ("softplus", False, None)
    assert shape.global_layers == (3, 7, 11, 15, 19, 23, 26)
    assert (shape.mla.q_rank, shape.mla.out_gate, shape.index) == (None, False, None)
    assert (shape.moe.latent, shape.moe.shared_width, shape.moe.scaling) == (None, 1024, 2.446)
    assert (shape.context_tokens, shape.latent_norm_eps) == (1048576, 1e-5)


def test_k31_is_k3_with_an_indexer() -> None:
    shape = parse_config(demo.CONFIG).shape
    assert shape.index is not None
    assert (shape.index.heads, shape.index.head_dim, shape.index.top_k, shape.index.rope_dim) == (4, 32, 64, 0)
    assert (shape.kda.gate, shape.activation, shape.attn_res_block) == ("bounded", "situ", 3)
    assert (shape.global_layers, shape.moe.expert_format) == ((3, 7, 8), "mxfp4")
    dense = parse_config(edited(demo.CONFIG, {"use_dsa": False}, "text_config")).shape
    assert (dense.index, dense.name) == (None, "k3")


def test_the_top_k_of_the_indexer_is_read_under_each_spelling() -> None:
    for spelling in ("index_topk", "index_top_k", "top_k", "topk"):
        edit = {"-index_topk": None, spelling: 48}
        shape = parse_config(edited(demo.CONFIG, edit, "text_config", "dsa_config")).shape
        assert shape.index is not None
        assert shape.index.top_k == 48


TEXT, LINEAR, DSA = ("text_config",), ("text_config", "linear_attn_config"), ("text_config", "dsa_config")
QUANT = ("text_config", "quantization_config", "config_groups", "group_0")


@pytest.mark.parametrize(
    ("path", "edit", "named"),
    [
        ((), {"surprise": 1}, "unknown field: surprise"),
        (TEXT, {"logit_softcap": 30.0, "a_field": 1}, "unknown fields: a_field, logit_softcap"),
        (LINEAR, {"allow_neg_eigval": True}, "linear_attn_config.allow_neg_eigval"),
        (DSA, {"pool": 4}, "dsa_config.pool"),
        (DSA, {"topk": 4}, "index_topk, topk"),
        (DSA, {"-index_topk": None}, "index_topk"),
        (DSA, {"index_key_dtype": "int4"}, "index_key_dtype='int4'"),
        (DSA, {"dsa_layers": [4, 8]}, "disagree"),
        (TEXT, {"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        (TEXT, {"num_expert_group": 8, "topk_group": 4}, "num_expert_group=8, topk_group=4"),
        (TEXT, {"mla_use_nope": False}, "mla_use_nope=False"),
        (TEXT, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (TEXT, {"hidden_size": "128"}, "hidden_size must be an integer"),
        (TEXT, {"-vocab_size": None}, "vocab_size"),
        (TEXT, {"num_key_value_heads": 1}, "num_key_value_heads"),
        (TEXT, {"qk_head_dim": 99}, "qk_head_dim"),
        (TEXT, {"q_lora_rank": None}, "q_lora_rank"),
        (TEXT, {"num_experts_per_token": 17}, "num_experts_per_token"),
        (LINEAR, {"kda_layers": [1, 2]}, "disagree"),
        (LINEAR, {"full_attn_layers": [0]}, "full_attn_layers must be a list of 1-based"),
        (("text_config", "quantization_config"), {"format": "nvfp4"}, "nvfp4"),
        ((*QUANT, "weights"), {"group_size": 16}, "group_size=16"),
        (QUANT, {"input_activations": {"num_bits": 8}}, "input_activations"),
    ],
)
def test_what_is_not_served_is_one_error_that_names_the_field(path: Any, edit: dict[str, Any], named: str) -> None:
    with pytest.raises(FolderError) as error:
        parse_config(edited(demo.CONFIG, edit, *path))
    assert named in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"text_config": 3}'])
def test_a_folder_without_a_usable_config_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(FolderError, match=str(tmp_path)):
        read_config(tmp_path)


def test_fields_of_the_outer_level_reach_the_text_model(tmp_path: Path) -> None:
    config = edited(demo.CONFIG, {"-max_position_embeddings": None}, "text_config")
    config["max_position_embeddings"] = 777
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path).shape.context_tokens == 777

"""Small random models of every family, and the pages to run them on. For tests only."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from forebay.kvstore.device import DevicePool
from forebay.kvstore.layout import Layout
from forebay.workers import demo
from forebay.workers.hf_config import parse_config
from forebay.workers.layers import load_weights
from forebay.workers.model import Model
from forebay.workers.step_pages import PageTable
from forebay.workers.weights import check_folder

BLOCK = 32


def _text(layers: int, globals_: Sequence[int], **fields: Any) -> dict[str, Any]:
    """demo-random's config with other layers and fields."""
    linear = demo.LINEAR_ATTENTION | {
        "full_attn_layers": list(globals_),
        "kda_layers": [n for n in range(1, layers + 1) if n not in globals_],
    }
    inner = demo.CONFIG["text_config"] | {"num_hidden_layers": layers, "linear_attn_config": linear} | fields
    return demo.CONFIG | {"text_config": inner}


def _kimi_linear() -> dict[str, Any]:
    absent = ("q_lora_rank", "routed_expert_hidden_size", "attn_res_block_size", "quantization_config", "dsa_config")
    config = _text(5, (4, 5), **dict.fromkeys(absent), hidden_act="silu", routed_scaling_factor=2.446)
    inner = config["text_config"]
    inner |= {"mla_use_output_gate": False, "latent_moe_use_norm": False, "num_experts_per_token": 2}
    inner["linear_attn_config"] |= {"use_full_rank_gate": False, "gate_lower_bound": None}
    return config


DSA_FP8_ROPE = {
    "index_head_dim": 32,
    "index_num_heads": 3,
    "index_topk": 48,
    "index_rope_dim": 16,
    "index_key_dtype": "fp8",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "demo": demo.CONFIG,
    "k3.1-fp8-rope": _text(
        7, (4, 6, 7), attn_res_block_size=4, dsa_config=DSA_FP8_ROPE, num_attention_heads=3, num_key_value_heads=3
    ),
    "k3-dense": _text(5, (4, 5), dsa_config=None, quantization_config=None, num_shared_experts=2),
    "kimi-linear": _kimi_linear(),
}


def small_model(
    name: str, folder: Path, seed: int = 7, block: int = BLOCK, dtype: torch.dtype = torch.float32
) -> Model:
    shape = parse_config(CONFIGS[name]).shape
    save_file(demo.random_weights(shape, seed), folder / "model.safetensors")
    return Model(shape, load_weights(check_folder(folder, shape), shape, dtype, torch.device("cpu")), block, b"")


def pages_for(layout: Layout, n_tokens: int, order: "np.random.Generator | None" = None, first: int = 0) -> PageTable:
    """Pages for one sequence from `first` on, shuffled by `order`."""
    n_pages = layout.pages_for(n_tokens) + layout.state_pages
    free = np.arange(first, first + n_pages, dtype=np.int32)
    if order is not None:
        order.shuffle(free)
    taken = iter(np.split(free, np.cumsum(_counts(layout, n_tokens))))
    groups = (*layout.paged, *layout.states)
    return {group.name: next(taken).reshape(len(group.layers), -1) for group in groups}


def _counts(layout: Layout, n_tokens: int) -> list[int]:
    rows = [len(group.layers) * -(-n_tokens // group.page_tokens) for group in layout.paged]
    return rows + [len(group.layers) for group in layout.states]


def dirty_pool(layout: Layout, n_pages: int, tables: Sequence[PageTable]) -> DevicePool:
    """A pool whose every byte is left over from somebody else (as fp32: NaN), but for the sequences' zeroed states."""
    pool = DevicePool(layout, n_pages)
    pool.bytes.fill_(0xFF)
    for table in tables:
        for group in layout.states:
            pool.bytes[torch.from_numpy(table[group.name].astype(np.int64)).flatten()] = 0
    return pool


def random_ids(model: Model, n_tokens: int, seed: int) -> torch.Tensor:
    return torch.randint(0, model.shape.vocab, (n_tokens,), generator=torch.Generator().manual_seed(seed))

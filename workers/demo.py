"""`demo-random`: a model folder of K3.1's shape, made from a seed, that any machine can run. It babbles.

The folder is an ordinary one (released field and tensor names, MXFP4 experts, a byte-level tokenizer with K3's
structure tokens) and goes through the same loading path as a released checkpoint.

Weights are random but not careless, so that a wrong cache hit shows in the logits: layers keep the scale of their
input, KDA channels forget over 1 to some 10,000 tokens (a state carries the whole prefix), the indexer's top-k is
smaller than a usual prompt, and logits spread enough to be far from uniform.
"""

import hashlib
import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from forebay.kernels import mxfp4
from forebay.kernels.shapes import ModelShape
from forebay.workers.config_fields import FolderError
from forebay.workers.hf_config import parse_config
from forebay.workers.tensor_table import expected_tensors

NAME = "demo-random"
TRAINED_NAME = "demo"
TRAINED_FOLDER = Path(__file__).parent / "demo_model"
SEED = 31
BLOCK_TOKENS = 32
DEFAULT_CACHE = Path.home() / ".cache" / "forebay"

SPECIALS = ("[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>", "[UNK]", "[PAD]")
IDS = {name: 256 + place for place, name in enumerate(SPECIALS)}
VOCAB = 256 + len(SPECIALS)

LAYERS, GLOBALS = 9, (4, 8, 9)  # counted from 1, as released configs do
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "group_size": 32,
                "strategy": "group",
                "symmetric": True,
                "dynamic": False,
                "observer": "minmax",
                "scale_dtype": "torch.uint8",
            },
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|down)_proj.*", "re:.*lm_head.*"],
}
LINEAR_ATTENTION = {
    "head_dim": 32,
    "num_heads": 4,
    "short_conv_kernel_size": 4,
    "kda_layers": [layer for layer in range(1, LAYERS + 1) if layer not in GLOBALS],
    "full_attn_layers": list(GLOBALS),
    "use_full_rank_gate": True,
    "gate_lower_bound": -5.0,
}
CONFIG = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "model_type": "kimi_k3",
    "bos_token_id": IDS["[BOS]"],
    "eos_token_id": IDS["<|end_of_msg|>"],
    "pad_token_id": IDS["[PAD]"],
    "tie_word_embeddings": False,
    "text_config": {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32768,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_experts": 16,
        "num_experts_per_token": 4,
        "num_shared_experts": 1,
        "moe_intermediate_size": 64,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "routed_scaling_factor": 1.0,
        "routed_expert_hidden_size": 64,
        "latent_moe_use_norm": True,
        "q_lora_rank": 64,
        "kv_lora_rank": 48,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "attn_res_block_size": 3,
        "num_nextn_predict_layers": 0,
        "linear_attn_config": LINEAR_ATTENTION,
        "dsa_config": {
            "index_head_dim": 32,
            "index_num_heads": 4,
            "index_topk": 64,
            "dsa_layers": list(GLOBALS),
        },
        "dtype": "bfloat16",
        "quantization_config": QUANTIZATION,
    },
}


def resolve(name_or_folder: str | Path, cache: Path = DEFAULT_CACHE) -> Path:
    """The folder of a built-in model, made in `cache` where it is not there yet; any other name is a folder's."""
    if str(name_or_folder) == TRAINED_NAME:
        return TRAINED_FOLDER
    if str(name_or_folder) == NAME:
        return make_folder(cache)
    folder = Path(name_or_folder)
    if not folder.is_dir():
        raise FolderError(
            f"{folder}: no such folder, and no built-in model of that name (built in: {TRAINED_NAME}, {NAME})"
        )
    return folder


def make_folder(cache: Path, seed: int = SEED) -> Path:
    """Write the folder under `cache` (once) and return it. Its bytes are a function of `seed` and of this file, whose
    digest stands in the folder's name. It appears whole, by a rename: a killed maker leaves nothing to mistake for it.
    """
    maker = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    folder = cache / f"{NAME}-{seed}-{maker}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=cache, ignore_cleanup_errors=True) as making:
        whole = Path(making) / "folder"
        whole.mkdir()
        _write_folder(whole, seed)
        try:
            whole.rename(folder)
        except OSError:
            assert folder.is_dir(), "a rename onto a new name fails only where another maker was first"
    return folder


def _write_folder(folder: Path, seed: int) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1), encoding="utf-8")
    _write_tokenizer(folder)
    save_file(random_weights(parse_config(CONFIG).shape, seed), folder / "model.safetensors", {"format": "pt"})


def random_weights(shape: ModelShape, seed: int) -> dict[str, Tensor]:
    """A whole checkpoint of `shape` under released names, bfloat16 but for what releases keep in fp32, from `seed`.

    Every tensor has a generator of its own, so that one does not change when another is added.
    """
    weights: dict[str, Tensor] = {}
    for place, (name, spec) in enumerate(expected_tensors(shape).items()):
        if name.endswith("weight_scale"):
            continue
        random = torch.Generator().manual_seed(seed * 1_000_003 + place)
        if name.endswith("weight_packed"):
            out, half = spec.shapes[0]
            packed, scale = mxfp4.quantize(_matrix((out, 2 * half), random))
            weights[name], weights[name.replace("_packed", "_scale")] = packed, scale
        else:
            weights["language_model." + name] = _tensor(name, spec.shapes[0], shape, random)
    return {n if n.startswith("language_model.") else "language_model." + n: w for n, w in weights.items()}


def _tensor(name: str, dims: tuple[int, ...], shape: ModelShape, random: torch.Generator) -> Tensor:
    if name.endswith("A_log"):
        return torch.empty(dims).uniform_(-0.5, 0.5, generator=random)
    if name.endswith("dt_bias"):
        return _forgetting(dims, random)
    if name.endswith(("e_score_correction_bias", "k_norm.bias")):
        return torch.randn(dims, generator=random) * 0.05
    if name.endswith("conv1d.weight"):
        return torch.randn(dims, generator=random) / math.sqrt(dims[-1])
    if name.endswith("o_norm.weight"):
        return 1 + 0.1 * torch.randn(dims, generator=random)
    if len(dims) == 1:
        return (1 + 0.1 * torch.randn(dims, generator=random)).bfloat16()
    if name == "model.embed_tokens.weight":
        return torch.randn(dims, generator=random).bfloat16()
    if name == "lm_head.weight":
        return (_matrix(dims, random) * _token_spread(shape.vocab)).bfloat16()
    return _matrix(dims, random).bfloat16()


def _matrix(dims: tuple[int, ...], random: torch.Generator) -> Tensor:
    """[out, in] that keeps the scale of its input."""
    return torch.randn(dims, generator=random) / math.sqrt(dims[-1])


def _forgetting(dims: tuple[int, ...], random: torch.Generator) -> Tensor:
    """dt_bias such that a channel forgets, 5·sigmoid(bias) a step around z = 0, from 1.0 down to 1e-4 (log-uniform)."""
    return torch.empty(dims).uniform_(-10.6, -1.4, generator=random)


def _token_spread(vocab: int) -> Tensor:
    """Standard deviation of each token's logit, [vocab, 1]: text is likely, control bytes and structure are rare."""
    spread = torch.full((vocab, 1), 0.3)
    spread[list(b"abcdefghijklmnopqrstuvwxyz ,.\n")] = 3.0
    spread[list(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-()'\"")] = 2.0
    if vocab == VOCAB:
        spread[IDS["<|end_of_msg|>"]] = 1.5
    return spread


def _write_tokenizer(folder: Path) -> None:
    """tokenizer.json: one token for each byte (id = the byte), no merges, then K3's structure tokens by name."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # not needed to run a model

    letters = dict(_byte_letters())
    tokenizer = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    assert all(tokenizer.token_to_id(name) == IDS[name] for name in SPECIALS)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "[BOS]", "eos_token": "<|end_of_msg|>", "unk_token": "[UNK]", "pad_token": "[PAD]"}
    settings = names | {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 32768}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    ends = {"bos_token_id": IDS["[BOS]"], "eos_token_id": [IDS["<|end_of_msg|>"]], "pad_token_id": IDS["[PAD]"]}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=1), encoding="utf-8")


def _byte_letters() -> Iterator[tuple[int, str]]:
    """The byte-level alphabet: printable bytes stand for themselves, the others for 256, 257, … in order."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = 0
    for byte in range(256):
        if byte in shown:
            yield byte, chr(byte)
        else:
            yield byte, chr(256 + hidden)
            hidden += 1

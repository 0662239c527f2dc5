"""Trainable weights: fp32 tensors under the released names (a layer's experts stacked), and what is made of them.

    start -> Parameters -> (each step) compute weights as the forward pass wants them -> (at the end) a model folder

Routed experts are rounded to MXFP4 in every forward pass, with the gradient passed straight through: what is trained is
what will be packed.
"""

import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from forebay.kernels import attnres, mxfp4
from forebay.kernels.moe import Dense, Experts
from forebay.kernels.shapes import ModelShape
from forebay.workers.layers import DenseWeights, GlobalWeights, KdaWeights, LayerWeights, ModelWeights, MoeWeights
from forebay.workers.tensor_table import INDEXER_NAMES, expected_tensors

Parameters = dict[str, Tensor]
FP32 = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias", "k_norm.weight", "k_norm.bias")
PROJECTIONS = ("w1", "w3", "w2")


def start(shape: ModelShape, seed: int, device: torch.device | str = "cpu") -> Parameters:
    """First values, fp32: projections that keep half their input's scale, mixes that average."""
    random = torch.Generator().manual_seed(seed)
    found: Parameters = {}
    for name, spec in expected_tensors(shape).items():
        if ".experts." not in name:
            found[name] = _first(name, spec.shapes[0], random)
    latent, width = shape.moe.latent or shape.hidden, shape.moe.width
    for layer in range(shape.dense_layers, shape.layers):
        for name, out, into in (("w1", width, latent), ("w3", width, latent), ("w2", latent, width)):
            found[experts_name(layer, name)] = _matrix((shape.moe.experts, out, into), random)
    return {name: value.to(device) for name, value in found.items()}


def experts_name(layer: int, projection: str) -> str:
    return f"model.layers.{layer}.block_sparse_moe.experts.{projection}"


def _first(name: str, dims: tuple[int, ...], random: torch.Generator) -> Tensor:
    if name.endswith("A_log"):
        return torch.zeros(dims)
    if name.endswith("dt_bias"):
        return torch.empty(dims).uniform_(-10.6, -1.4, generator=random)
    if name.endswith(("e_score_correction_bias", "k_norm.bias", "res_proj.weight")):
        return torch.zeros(dims)
    if name.endswith("conv1d.weight"):
        return torch.randn(dims, generator=random) / math.sqrt(dims[-1])
    if name == "model.embed_tokens.weight":
        return torch.randn(dims, generator=random) * 0.5
    return torch.ones(dims) if len(dims) == 1 else _matrix(dims, random)


def _matrix(dims: tuple[int, ...], random: torch.Generator) -> Tensor:
    return torch.randn(dims, generator=random) * (0.5 / math.sqrt(dims[-1]))


def rounded(w: Tensor) -> Tensor:
    """w [..., out, in] as MXFP4 would store it, the gradient passed straight through. In closed form, since a look-up
    cannot be captured in a CUDA graph: the same values as `mxfp4.unpack(*mxfp4.quantize(w))`.
    """
    groups = w.detach().view(*w.shape[:-1], -1, mxfp4.GROUP)
    bits = groups.abs().amax(-1, keepdim=True).view(torch.int32)
    multiplier = ((((bits + (1 << 21)) >> 23) - 2).clamp(1, 254) << 23).view(torch.float32)
    size = (groups / multiplier).abs()
    fine, middle, coarse = (size * 2).round() / 2, size.round(), (size / 2).round() * 2
    code = torch.where(size < 2, fine, torch.where(size < 4, middle, coarse)).clamp(max=6.0)
    return w + (torch.copysign(code * multiplier, groups).flatten(-2) - w.detach())


class _Reader:
    """Parameters below one prefix, in the compute dtype."""

    def __init__(self, parameters: Parameters, prefix: str, dtype: torch.dtype) -> None:
        self.parameters, self.prefix, self.dtype = parameters, prefix, dtype

    def under(self, prefix: str) -> "_Reader":
        return _Reader(self.parameters, self.prefix + prefix, self.dtype)

    def fp32(self, name: str) -> Tensor:
        return self.parameters[self.prefix + name]

    def __call__(self, name: str) -> Tensor:
        return self.fp32(name).to(self.dtype)

    def stacked(self, *names: str) -> Tensor:
        return torch.cat([self(f"{name}.weight") for name in names])


def assemble(parameters: Parameters, shape: ModelShape, dtype: torch.dtype) -> ModelWeights:
    """The weights that `layers.load_weights` would read from a folder of `parameters`; differentiable."""
    read = _Reader(parameters, "", dtype)
    consumers = [f"layers.{i}.{part}" for i in range(shape.layers) for part in ("self_attention", "mlp")]
    queries = [
        attnres.fold(read.fp32(f"model.{c}_res_norm.weight"), read.fp32(f"model.{c}_res_proj.weight"))
        for c in (*consumers, "output_attn")
    ]
    return ModelWeights(
        embedding=read("model.embed_tokens.weight"),
        layers=tuple(_layer(read.under(f"model.layers.{i}."), shape, i) for i in range(shape.layers)),
        residual_queries=torch.stack(queries),
        norm=read("model.norm.weight"),
        head=read("lm_head.weight"),
    )


def _layer(read: _Reader, shape: ModelShape, layer: int) -> LayerWeights:
    attention = read.under("self_attn.")
    return LayerWeights(
        attention_norm=read("input_layernorm.weight"),
        attention=_global(attention, shape) if layer in shape.global_layers else _kda(attention),
        mlp_norm=read("post_attention_layernorm.weight"),
        mlp=_dense(read.under("mlp.")) if layer < shape.dense_layers else _moe(read.under("block_sparse_moe."), shape),
    )


def _kda(read: _Reader) -> KdaWeights:
    names = [f"{name}_proj" for name in ("q", "k", "v", "f_a", "b", "g")]
    widths = [len(read.fp32(f"{name}.weight")) for name in names]
    return KdaWeights(
        into=read.stacked(*names),
        widths=[sum(widths[:3]), *widths[3:]],
        conv=torch.cat([read.fp32(f"{letter}_conv1d.weight").squeeze(1) for letter in "qkv"]),
        decay_up=read("f_b_proj.weight"),
        A_log=read.fp32("A_log"),
        dt_bias=read.fp32("dt_bias"),
        gate_up=None,
        norm=read.fp32("o_norm.weight"),
        out=read("o_proj.weight"),
    )


def _global(read: _Reader, shape: ModelShape) -> GlobalWeights:
    mla, index = shape.mla, shape.index
    assert index is not None
    assert mla.q_rank is not None
    names = [INDEXER_NAMES[role].removesuffix(".weight") for role in ("key", "head_weights", "query")]
    expand = read("kv_b_proj.weight").view(mla.heads, mla.nope_dim + mla.value_dim, mla.kv_rank)
    return GlobalWeights(
        into=read.stacked("q_a_proj", "kv_a_proj_with_mqa", "g_proj", *names[:2]),
        widths=[mla.q_rank, mla.kv_rank, mla.pe_dim, mla.heads * mla.value_dim, index.head_dim, index.heads],
        query_norm=read("q_a_layernorm.weight"),
        query_up=read.stacked("q_b_proj", names[2]),
        latent_norm=read("kv_a_layernorm.weight"),
        w_uk=expand[:, : mla.nope_dim],
        w_uv=expand[:, mla.nope_dim :].transpose(1, 2),
        key_norm=(read.fp32(INDEXER_NAMES["key_norm_weight"]), read.fp32(INDEXER_NAMES["key_norm_bias"])),
        out=read("o_proj.weight"),
    )


def _dense(read: _Reader) -> DenseWeights:
    return DenseWeights(into=read.stacked("gate_proj", "up_proj"), out=read("down_proj.weight"))


def _moe(read: _Reader, shape: ModelShape) -> MoeWeights:
    moe = shape.moe
    assert moe.latent is not None
    w1, w3, w2 = (Dense(rounded(read.fp32(f"experts.{name}")).to(read.dtype)) for name in PROJECTIONS)
    return MoeWeights(
        router=read.fp32("gate.weight"),
        bias=read.fp32("gate.e_score_correction_bias"),
        into=read.stacked("shared_experts.gate_proj", "shared_experts.up_proj", "routed_expert_down_proj"),
        widths=[moe.shared_width, moe.shared_width, moe.latent],
        experts=Experts(w1=w1, w3=w3, w2=w2),
        norm=read("routed_expert_norm.weight"),
        out=torch.cat((read("shared_experts.down_proj.weight"), read("routed_expert_up_proj.weight")), dim=1),
    )


def released(parameters: Parameters) -> dict[str, Tensor]:
    """The tensors of a model folder: released names and dtypes, experts packed one by one."""
    stored: dict[str, Tensor] = {}
    for name, value in parameters.items():
        fixed = value.detach().cpu().contiguous()
        if ".experts." not in name:
            stored[f"language_model.{name}"] = fixed.float() if name.endswith(FP32) else fixed.bfloat16()
            continue
        prefix, _, projection = name.rpartition(".")
        packed, scale = mxfp4.quantize(fixed)
        for expert in range(len(packed)):
            stored[f"language_model.{prefix}.{expert}.{projection}.weight_packed"] = packed[expert].contiguous()
            stored[f"language_model.{prefix}.{expert}.{projection}.weight_scale"] = scale[expert].contiguous()
    return stored


def write(parameters: Parameters, folder: Path) -> None:
    """model.safetensors of `parameters`, beside the config.json that `folder` already has."""
    save_file(released(parameters), folder / "model.safetensors", {"format": "pt"})


def read(shape: ModelShape, folder: Path, device: torch.device | str = "cpu") -> Parameters:
    """Parameters to train on from: those of a folder that `write` has written."""
    from safetensors.torch import load_file

    stored = load_file(folder / "model.safetensors")
    found: Parameters = {}
    for name, first in start(shape, seed=0).items():
        if ".experts." not in name:
            found[name] = stored[f"language_model.{name}"].float()
            continue
        prefix, _, projection = name.rpartition(".")
        names = [f"language_model.{prefix}.{expert}.{projection}.weight_" for expert in range(len(first))]
        packed, scale = (torch.stack([stored[n + part] for n in names]) for part in ("packed", "scale"))
        found[name] = mxfp4.unpack(packed, scale)
    return {name: value.to(device) for name, value in found.items()}

"""A layer's weights as the forward pass wants them: projections of one input fused to one matrix, some in fp32.

All matrices are [out, in]. `into` stacks what reads the layer's normed input, in the order that the class names; the
widths of its parts stand in `widths`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.kernels import attnres
from forebay.kernels.moe import Dense, Experts, Packed
from forebay.kernels.shapes import ModelShape
from forebay.workers.config_fields import FolderError
from forebay.workers.tensor_table import INDEXER_NAMES
from forebay.workers.weights import CheckedFolder


@dataclass(frozen=True, slots=True)
class KdaWeights:
    """`into`: q, k, v, decay rank, beta, output gate (whole, or its rank where `gate_up` is there)."""

    into: Tensor
    widths: list[int]
    conv: Tensor
    decay_up: Tensor
    A_log: Tensor
    dt_bias: Tensor
    gate_up: Tensor | None
    norm: Tensor
    out: Tensor


@dataclass(frozen=True, slots=True)
class GlobalWeights:
    """`into`: query (or its latent), latent, shared key, output gate, index key, index head weights (0 wide where
    absent). `query_up`: queries, then index queries."""

    into: Tensor
    widths: list[int]
    query_norm: Tensor | None
    query_up: Tensor | None
    latent_norm: Tensor
    w_uk: Tensor
    w_uv: Tensor
    key_norm: tuple[Tensor, Tensor] | None
    out: Tensor


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """`into`: gate, up."""

    into: Tensor
    out: Tensor


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """`into`: shared gate, shared up, then the routed experts' latent (0 wide where they read the input itself).
    `out`: shared down, then the routed sum's way back (absent likewise)."""

    router: Tensor
    bias: Tensor
    into: Tensor
    widths: list[int]
    experts: Experts
    norm: Tensor | None
    out: Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention_norm: Tensor
    attention: KdaWeights | GlobalWeights
    mlp_norm: Tensor
    mlp: DenseWeights | MoeWeights


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """`residual_queries` [2·layers + 1, hidden] fp32, folded; None for plain residuals."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    residual_queries: Tensor | None
    norm: Tensor
    head: Tensor


class _Reader:
    """Reads below one prefix, in the compute dtype unless said otherwise."""

    def __init__(self, folder: CheckedFolder, prefix: str, dtype: torch.dtype, device: torch.device) -> None:
        self.folder, self.prefix, self.dtype, self.device = folder, prefix, dtype, device

    def under(self, prefix: str) -> "_Reader":
        return _Reader(self.folder, self.prefix + prefix, self.dtype, self.device)

    def __call__(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        return self.folder.tensor(self.prefix + name, dtype or self.dtype).to(self.device)

    def fp32(self, name: str) -> Tensor:
        return self(name, torch.float32)

    def stacked(self, *names: str) -> tuple[Tensor, list[int]]:
        parts = [self(f"{name}.weight") for name in names]
        return torch.cat(parts), [len(part) for part in parts]


def load_weights(folder: CheckedFolder, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """Read a checked folder layer by layer."""
    read = _Reader(folder, "", dtype, device)
    return ModelWeights(
        embedding=read("model.embed_tokens.weight"),
        layers=tuple(_layer(read.under(f"model.layers.{i}."), shape, i) for i in range(shape.layers)),
        residual_queries=None if shape.attn_res_block is None else _residual_queries(read, shape),
        norm=read("model.norm.weight"),
        head=read("lm_head.weight"),
    )


def _residual_queries(read: _Reader, shape: ModelShape) -> Tensor:
    consumers = [f"layers.{i}.{part}" for i in range(shape.layers) for part in ("self_attention", "mlp")]
    names = [f"model.{consumer}_res" for consumer in (*consumers, "output_attn")]
    return torch.stack([attnres.fold(read.fp32(f"{n}_norm.weight"), read.fp32(f"{n}_proj.weight")) for n in names])


def _layer(read: _Reader, shape: ModelShape, layer: int) -> LayerWeights:
    attention = read.under("self_attn.")
    return LayerWeights(
        attention_norm=read("input_layernorm.weight"),
        attention=_global(attention, shape) if layer in shape.global_layers else _kda(attention, shape),
        mlp_norm=read("post_attention_layernorm.weight"),
        mlp=_dense(read.under("mlp.")) if layer < shape.dense_layers else _moe(read.under("block_sparse_moe."), shape),
    )


def _kda(read: _Reader, shape: ModelShape) -> KdaWeights:
    full_rank = shape.kda.full_rank_out_gate
    gate = "g_proj" if full_rank else "g_a_proj"
    into, widths = read.stacked("q_proj", "k_proj", "v_proj", "f_a_proj", "b_proj", gate)
    return KdaWeights(
        into=into,
        widths=[sum(widths[:3]), *widths[3:]],
        conv=torch.cat([read.fp32(f"{letter}_conv1d.weight").squeeze(1) for letter in "qkv"]),
        decay_up=read("f_b_proj.weight"),
        A_log=_heads_of(read.fp32("A_log"), shape.kda.heads, f"{read.prefix}A_log"),
        dt_bias=read.fp32("dt_bias"),
        gate_up=None if full_rank else read("g_b_proj.weight"),
        norm=read.fp32("o_norm.weight"),
        out=read("o_proj.weight"),
    )


def _heads_of(A_log: Tensor, heads: int, name: str) -> Tensor:
    """The heads' own values of a tensor [heads], [1, 1, heads, 1], or one zero-padded to a multiple of 128."""
    flat = A_log.flatten()
    if flat[heads:].any():
        raise FolderError(f"{name}: {len(flat)} entries for {heads} heads, and those beyond are not zero")
    return flat[:heads].clone()


def _global(read: _Reader, shape: ModelShape) -> GlobalWeights:
    mla, index = shape.mla, shape.index
    names = {
        "q_proj" if mla.q_rank is None else "q_a_proj": True,
        "kv_a_proj_with_mqa": True,
        "g_proj": mla.out_gate,
        INDEXER_NAMES["key"].removesuffix(".weight"): index is not None,
        INDEXER_NAMES["head_weights"].removesuffix(".weight"): index is not None,
    }
    into, _ = read.stacked(*(name for name, there in names.items() if there))
    gate = mla.heads * mla.value_dim if mla.out_gate else 0
    query = mla.q_rank or mla.heads * mla.query_dim
    indexer = (index.head_dim, index.heads) if index is not None else (0, 0)
    expand = read("kv_b_proj.weight").view(mla.heads, mla.nope_dim + mla.value_dim, mla.kv_rank)
    return GlobalWeights(
        into=into,
        widths=[query, mla.kv_rank, mla.pe_dim, gate, *indexer],
        query_norm=None if mla.q_rank is None else read("q_a_layernorm.weight"),
        query_up=None if mla.q_rank is None else _query_up(read, index is not None),
        latent_norm=read("kv_a_layernorm.weight"),
        w_uk=expand[:, : mla.nope_dim].contiguous(),
        w_uv=expand[:, mla.nope_dim :].transpose(1, 2).contiguous(),
        key_norm=None if index is None else _key_norm(read),
        out=read("o_proj.weight"),
    )


def _query_up(read: _Reader, indexed: bool) -> Tensor:
    names = ["q_b_proj"] + ([INDEXER_NAMES["query"].removesuffix(".weight")] if indexed else [])
    return read.stacked(*names)[0]


def _key_norm(read: _Reader) -> tuple[Tensor, Tensor]:
    return read.fp32(INDEXER_NAMES["key_norm_weight"]), read.fp32(INDEXER_NAMES["key_norm_bias"])


def _dense(read: _Reader) -> DenseWeights:
    return DenseWeights(into=read.stacked("gate_proj", "up_proj")[0], out=read("down_proj.weight"))


def _moe(read: _Reader, shape: ModelShape) -> MoeWeights:
    moe = shape.moe
    latent = ["routed_expert_down_proj"] if moe.latent is not None else []
    into, _ = read.stacked("shared_experts.gate_proj", "shared_experts.up_proj", *latent)
    down = [read("shared_experts.down_proj.weight")]
    if moe.latent is not None:
        down.append(read("routed_expert_up_proj.weight"))
    return MoeWeights(
        router=read.fp32("gate.weight"),
        bias=read.fp32("gate.e_score_correction_bias"),
        into=into,
        widths=[moe.shared_width, moe.shared_width, moe.latent or 0],
        experts=Experts(**{name: _experts(read, shape, name) for name in ("w1", "w3", "w2")}),
        norm=read("routed_expert_norm.weight") if moe.latent_norm else None,
        out=torch.cat(down, dim=1),
    )


def _experts(read: _Reader, shape: ModelShape, name: str) -> Dense | Packed:
    """One projection of all experts, filled expert by expert; MXFP4 stays packed."""
    if shape.moe.expert_format == "mxfp4":
        parts = ("weight_packed", "weight_scale")
        return Packed(*(_filled(read, shape.moe.experts, f"{name}.{part}", torch.uint8) for part in parts))
    return Dense(_filled(read, shape.moe.experts, f"{name}.weight", read.dtype))


def _filled(read: _Reader, experts: int, name: str, dtype: torch.dtype) -> Tensor:
    first = read(f"experts.0.{name}", dtype)
    filled = first.new_empty(experts, *first.shape)
    for expert in range(experts):
        filled[expert] = read(f"experts.{expert}.{name}", dtype)
    return filled

"""Model shapes as data. Every size, byte count and FLOP count in Forebay comes from a `ModelShape`.

Layer numbers are 0-based here; released config files count from 1.
"""

from dataclasses import dataclass
from typing import Literal

Gate = Literal["bounded", "softplus"]
Activation = Literal["silu", "situ"]
KeyDtype = Literal["fp32", "fp8"]
ExpertFormat = Literal["plain", "mxfp4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaShape:
    """One KDA layer. `head_dim` is both K and V of the recurrent state [heads, K, V]."""

    heads: int
    head_dim: int
    conv_width: int = 4
    gate: Gate = "bounded"
    gate_lower_bound: float = -5.0
    gate_rank: int
    full_rank_out_gate: bool

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaShape:
    """A global layer's latent attention. A latent row is `kv_rank + pe_dim` elements, never rotated."""

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    pe_dim: int
    value_dim: int
    out_gate: bool

    @property
    def row_elements(self) -> int:
        return self.kv_rank + self.pe_dim

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.pe_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexShape:
    """The lightning indexer of a global layer: one key of `head_dim` a token, shared by all index heads."""

    heads: int
    head_dim: int
    top_k: int
    rope_dim: int = 0
    rope_theta: float = 10000.0
    key_dtype: KeyDtype = "fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeShape:
    """Routed experts (of `latent` width where set, else of hidden width) and one shared expert MLP."""

    experts: int
    per_token: int
    width: int
    shared_width: int
    latent: int | None
    latent_norm: bool
    scaling: float
    renormalize: bool = True
    expert_format: ExpertFormat = "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A whole text model. `index` is None for dense global layers, `attn_res_block` None for plain residuals."""

    name: str
    layers: int
    hidden: int
    vocab: int
    dense_width: int
    dense_layers: int
    global_layers: tuple[int, ...]
    kda: KdaShape
    mla: MlaShape
    index: IndexShape | None
    moe: MoeShape
    activation: Activation
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0
    attn_res_block: int | None
    norm_eps: float = 1e-5
    latent_norm_eps: float = 1e-5
    context_tokens: int
    bos_id: int
    eos_id: int
    pad_id: int

    @property
    def kda_layers(self) -> tuple[int, ...]:
        globals_ = set(self.global_layers)
        return tuple(layer for layer in range(self.layers) if layer not in globals_)

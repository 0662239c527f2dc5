"""A decode step of one group of K3.1's layers at one of eight ranks' shapes, as one CUDA graph, beside its floor."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forebay.kernels import bench_inputs, costs, slice_step
from forebay.kernels.bench_moe import random_experts
from forebay.kernels.bench_timing import median_ms
from forebay.kernels.dsa_batch import key_parts
from forebay.kernels.layer_parts import GlobalPart, KdaPart, MoePart
from forebay.kernels.mla_batch import Pages
from forebay.kernels.models import K3_1_PRO
from forebay.kernels.moe import Packed
from forebay.kernels.moe_batch import Local
from forebay.kernels.shapes import IndexShape, ModelShape
from forebay.kernels.slice_step import Slice
from forebay.ops.bench_report import Reference, Row

COPY_BYTES_PER_MS = 4.26e9
RANKS, BLOCKS = 8, 4
SMALL = replace(
    K3_1_PRO,
    hidden=64,
    kda=replace(K3_1_PRO.kda, heads=16, head_dim=16, gate_rank=16),
    mla=replace(K3_1_PRO.mla, heads=16, q_rank=32, kv_rank=32, nope_dim=16, pe_dim=16, value_dim=16),
    index=IndexShape(heads=2, head_dim=32, top_k=16, key_dtype="fp8"),
    moe=replace(K3_1_PRO.moe, experts=16, per_token=4, width=128, shared_width=128, latent=128),
)


def rows(device: torch.device, repeats: int) -> Iterator[Row]:
    """Batches of 1 and 32 at 65536 tokens each; on a CPU a small group, which shows that it works."""
    on_gpu = device.type == "cuda"
    shape, tokens = (K3_1_PRO, 65_536) if on_gpu else (SMALL, 128)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    for batch in (1, 32) if on_gpu else (2,):
        of = group(shape, batch, tokens, device, dtype)
        prefix = torch.randn(batch, shape.hidden, device=device).to(dtype)
        bank = torch.randn(BLOCKS, batch, shape.hidden, device=device).to(dtype)
        lengths = torch.full((batch,), tokens, dtype=torch.int32, device=device)
        assert bool(slice_step.step(of, prefix, bank, lengths).isfinite().all()), "a step gives numbers"
        if on_gpu:
            check_replay(of, prefix, bank, lengths)
        ms = median_ms(
            lambda of=of, p=prefix, b=bank, n=lengths: slice_step.step(of, p, b, n),  # type: ignore[misc]
            device,
            repeats,
        )
        floor = Reference(name="floor", value=least_bytes(of, batch, tokens) / COPY_BYTES_PER_MS)
        yield Row(name=f"slice of 4 layers, one of {RANKS} ranks, B {batch}", value=ms, unit="ms", reference=floor)
        if on_gpu:
            launched = launches(of, prefix, bank, lengths)
            yield Row(name=f"slice of 4 layers, B {batch}: kernels of a step", value=launched, unit="kernels")


def check_replay(of: Slice, prefix: Tensor, bank: Tensor, lengths: Tensor) -> None:
    """A graph of a step, replayed after lengths changed in place, gives the bits of a step made then."""
    parts = [part for part, _ in of.layers if isinstance(part, KdaPart)]
    kept = [(part.states.clone(), part.tails.clone()) for part in parts]
    asked = lengths.clone()

    def restore() -> None:
        for part, (states, tails) in zip(parts, kept, strict=True):
            part.states.copy_(states)
            part.tails.copy_(tails)

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = slice_step.step(of, prefix, bank, lengths)
    lengths.sub_(777)
    restore()
    graph.replay()
    made = out.clone()
    restore()
    assert torch.equal(made, slice_step.step(of, prefix, bank, lengths)), "a replay follows its tensors"
    restore()
    lengths.copy_(asked)


def launches(of: Slice, prefix: Tensor, bank: Tensor, lengths: Tensor) -> int:
    """Kernels and copies that a step puts on the device."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        slice_step.step(of, prefix, bank, lengths)
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in seen.events() or ())


def group(shape: ModelShape, batch: int, tokens: int, device: torch.device, dtype: torch.dtype) -> Slice:
    """Three KDA layers and a global one with random weights, states and pages for `tokens` tokens a sequence."""

    make = _Random(shape, batch, tokens, device, dtype)
    layers = [(make.kda(), make.moe()) for _ in range(3)] + [(make.attention(), make.moe())]
    queries = torch.randn(8, shape.hidden, device=device) * shape.hidden**-0.5
    return Slice(shape=shape, layers=layers, queries=queries, norms=[make.ones(shape.hidden)] * 8)


@dataclass(frozen=True, slots=True)
class _Random:
    """Parts of one rank, for `batch` sequences of `tokens` tokens."""

    shape: ModelShape
    batch: int
    tokens: int
    device: torch.device
    dtype: torch.dtype

    def matrix(self, out: int, into: int) -> Tensor:
        return torch.randn(out, into, device=self.device).mul_(into**-0.5).to(self.dtype)

    def ones(self, n: int) -> Tensor:
        return torch.ones(n, device=self.device, dtype=self.dtype)

    def kda(self) -> KdaPart:
        heads, dim, rank = self.shape.kda.heads // RANKS, self.shape.kda.head_dim, self.shape.kda.gate_rank
        width = heads * dim
        layer = bench_inputs.layer(heads, dim, self.device)
        states, tails = bench_inputs.pages(self.batch, layer, self.dtype)
        return KdaPart(
            into=self.matrix(4 * width + rank + heads, self.shape.hidden), decay_up=self.matrix(width, rank),
            layer=layer, out=self.matrix(self.shape.hidden, width), states=states, tails=tails,
            page=torch.arange(self.batch, dtype=torch.int32, device=self.device),
        )  # fmt: skip

    def attention(self) -> GlobalPart:
        m, index, heads = self.shape.mla, self.shape.index, self.shape.mla.heads // RANKS
        assert m.q_rank is not None
        assert index is not None
        page = 1024 if self.tokens >= 1024 else 64
        count = -(-self.tokens // page)
        table = torch.randperm(self.batch * count, device=self.device).int().view(self.batch, count)
        rows = torch.randn(self.batch * count, page, m.row_elements, device=self.device).to(self.dtype)
        keys = torch.zeros(self.batch * count, page, index.head_dim + 4, dtype=torch.uint8, device=self.device)
        codes, scales = key_parts(keys)
        codes.copy_(torch.randn(codes.shape, device=self.device).to(codes.dtype))
        scales.fill_(0.125)
        widths = m.q_rank + m.row_elements + heads * m.value_dim + index.head_dim + index.heads
        w_uk = self.matrix(heads * m.nope_dim, m.kv_rank).view(heads, m.nope_dim, m.kv_rank)
        w_uv = self.matrix(heads * m.kv_rank, m.value_dim).view(heads, m.kv_rank, m.value_dim)
        key_norm = torch.ones(index.head_dim, device=self.device), torch.zeros(index.head_dim, device=self.device)
        return GlobalPart(
            into=self.matrix(widths, self.shape.hidden), query_norm=self.ones(m.q_rank),
            row_norm=self.ones(m.kv_rank), key_norm=key_norm,
            query_up=self.matrix(heads * m.query_dim + index.heads * index.head_dim, m.q_rank), w_uk=w_uk, w_uv=w_uv,
            out=self.matrix(self.shape.hidden, heads * m.value_dim), rows=Pages(pool=rows, table=table),
            keys=Pages(pool=keys, table=table),
        )  # fmt: skip

    def moe(self) -> MoePart:
        m, shared = self.shape.moe, self.shape.moe.shared_width // RANKS
        assert m.latent is not None
        experts = random_experts(m.experts // RANKS, m.latent, m.width, self.device)
        return MoePart(
            into=self.matrix(2 * shared + m.latent + m.experts, self.shape.hidden),
            bias=torch.zeros(m.experts, device=self.device), experts=experts, local=Local(0, m.experts),
            norm=self.ones(m.latent), out=self.matrix(self.shape.hidden, shared + m.latent),
        )  # fmt: skip


def least_bytes(of: Slice, batch: int, tokens: int) -> int:
    """Weights, states and rows that a step must read or write once; of the experts those of a mean step."""
    total = 0
    for attention, mlp in of.layers:
        total += sum(p.nbytes for p in (attention.into, attention.out, mlp.into, mlp.out))
        if isinstance(attention, KdaPart):
            assert attention.decay_up is not None
            total += attention.decay_up.nbytes + batch * 2 * (attention.states[0].nbytes + attention.tails[0].nbytes)
        else:
            assert attention.query_up is not None
            assert attention.keys is not None
            total += sum(p.nbytes for p in (attention.query_up, attention.w_uk, attention.w_uv))
            total += batch * tokens * attention.keys.pool.shape[2]
            top_k = of.shape.index.top_k if of.shape.index else tokens
            total += batch * min(tokens, top_k) * attention.rows.pool.shape[2] * costs.BF16
        m = of.shape.moe
        used = m.experts / RANKS * (1 - (1 - m.per_token / m.experts) ** batch)
        parts = [p for p in (mlp.experts.w1, mlp.experts.w3, mlp.experts.w2) if isinstance(p, Packed)]
        total += int(used * sum(p.packed[0].nbytes + p.scale[0].nbytes for p in parts))
    return total

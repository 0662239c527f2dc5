"""Runs the engine's own kernels (a layer's small operators, plain experts, exact products) under Triton's interpreter
on small random inputs in fp32 and prints each case's largest relative error against its twin as JSON. A program of its
own: TRITON_INTERPRET is read when the kernels are imported.
"""

import json
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from forebay.kernels import exact_triton, layer_batch, layer_triton, moe, moe_batch, moe_dense_triton
from forebay.kernels.bench_inputs import relative
from forebay.kernels.mla_batch import Pages
from forebay.kernels.models import K3, KIMI_LINEAR_48B
from forebay.kernels.moe_batch import Local, Norm
from forebay.kernels.moe_dense_triton import Launch
from forebay.kernels.moe_triton import Size

EXPERTS, INNER, WIDTH, PER_TOKEN = 5, 128, 256, 2


def add_norm(outputs: int) -> float:
    """Rows of a wider tensor, as a projection's parts are."""
    wide = torch.randn(3, 7, 100)
    prefix, others, weight = wide[0, :, :72], tuple(wide[1 : 1 + outputs, :, 9:81]), torch.rand(72)
    pairs = zip(*(m.add_norm(prefix, others, weight, 1e-5) for m in (layer_triton, layer_batch)), strict=True)
    return max(relative(a, b) for a, b in pairs)


def glu(situ: bool) -> float:
    x, shape = torch.randn(6, 200), K3 if situ else KIMI_LINEAR_48B
    out = torch.zeros(6, 120)
    layer_triton.glu(x[:, :90], x[:, 100:190], shape, out[:, 20:110])
    return relative(out[:, 20:110], layer_batch.glu(x[:, :90], x[:, 100:190], shape))


def write_rows(sequences: int) -> float:
    """A token of each of several sequences, or all of one's; other rows stay."""
    positions = torch.tensor([3, 14, 9, 0], dtype=torch.int32)
    table = torch.randperm(8)[: 2 * sequences].view(sequences, 2).int()
    wide, weight, pool = torch.randn(4, 60), torch.rand(24), torch.randn(8, 8, 36)
    pools = [pool.clone(), pool.clone()]
    for kernels, to in zip((layer_triton, layer_batch), pools, strict=True):
        kernels.write_rows(wide[:, :24], wide[:, 30:42], weight, 1e-5, positions, Pages(pool=to, table=table))
    return relative(*pools)


def short_conv(tokens: int) -> float:
    wide, taps, tail = torch.randn(tokens, 300), torch.randn(4, 150), torch.randn(3, 150)
    tails = [tail.clone(), tail.clone()]
    made = [m.short_conv(wide[:, 7:157], taps, t) for m, t in zip((layer_triton, layer_batch), tails, strict=True)]
    return max(relative(*made), relative(*tails))


def gated_norm() -> float:
    o, gate, weight = torch.randn(9, 3, 20), torch.randn(9, 80)[:, 5:65], torch.rand(20)
    return relative(*(m.gated_norm(o, gate, weight, 1e-5) for m in (layer_triton, layer_batch)))


def choose() -> float:
    wide, bias = torch.randn(11, 50), torch.randn(40) * 0.1
    found, right = (m.choose(wide[:, 3:43], bias, 4, 2.0, True) for m in (layer_triton, layer_batch))
    return relative(found[1], right[1]) if torch.equal(found[0], right[0]) else 1.0


def launch(tokens: int, rows: int) -> Launch:
    return Launch(size=Size(tokens=tokens, rows=rows), down=Size(tokens=tokens, rows=rows))


def experts(tokens: int, launches: tuple[Launch, ...], local: Local, norm: Norm | None = None) -> float:
    def one(out: int, into: int) -> moe.Dense:
        return moe.Dense(torch.randn(EXPERTS, out, into) * into**-0.5)

    w = moe.Experts(w1=one(WIDTH, INNER), w3=one(WIDTH, INNER), w2=one(INNER, WIDTH))
    z, share = torch.randn(tokens, INNER), torch.rand(tokens, PER_TOKEN)
    chosen = torch.rand(tokens, local.of or EXPERTS).argsort(1)[:, :PER_TOKEN].sort(1).values.int()
    shape = replace(K3, activation="silu")
    tuned = ((float("inf"), launches),)
    found = moe_dense_triton.experts(z, chosen, share, w, shape, local, norm, tuned=tuned)
    return relative(found, moe_batch.experts(z, chosen, share, w, shape, local, norm))


def product(rows: int) -> float:
    """Strided inputs; a row alone has the bits that it has among others."""
    x, w = torch.randn(3, rows, 75).transpose(0, 1).contiguous().transpose(0, 1), torch.randn(3, 70, 75)
    found: Tensor = exact_triton.bmm(x, w.transpose(1, 2))
    alone = exact_triton.bmm(x[:, -1:], w.transpose(1, 2))
    return relative(found, torch.bmm(x, w.transpose(1, 2))) if torch.equal(alone, found[:, -1:]) else 1.0


CASES: dict[str, Callable[[], float]] = {
    "add-norm-0": lambda: add_norm(0),
    "add-norm-1": lambda: add_norm(1),
    "add-norm-2": lambda: add_norm(2),
    "glu-silu": lambda: glu(False),
    "glu-situ": lambda: glu(True),
    "write-rows-of-many": lambda: write_rows(4),
    "write-rows-of-one": lambda: write_rows(1),
    "conv-40": lambda: short_conv(40),
    "conv-2": lambda: short_conv(2),
    "gated-norm": gated_norm,
    "choose": choose,
    "experts-few": lambda: experts(3, (launch(16, 64),), Local()),
    "experts-mixed": lambda: experts(30, (launch(16, 64), launch(32, 128)), Local(1, 8)),
    "experts-normed": lambda: experts(5, (launch(16, 64),), Local(), Norm(torch.rand(INNER), 1e-5)),
    "product-37": lambda: product(37),
    "product-1": lambda: product(1),
}

if __name__ == "__main__":
    torch.manual_seed(0)
    print(json.dumps({name: case() for name, case in CASES.items()}))

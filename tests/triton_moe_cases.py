"""Runs the kernels of routed experts under Triton's interpreter on small random inputs in fp32 and prints each case's
largest relative error against its twin as JSON. A program of its own: TRITON_INTERPRET is read when the kernels are
imported.
"""

import json
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from forebay.kernels import moe, moe_batch, mxfp4
from forebay.kernels import moe_triton as fast
from forebay.kernels.bench_inputs import relative
from forebay.kernels.models import K3
from forebay.kernels.moe_batch import ALL, Local, Norm
from forebay.kernels.shapes import ModelShape

EXPERTS, LATENT, WIDTH, PER_TOKEN = 7, 128, 256, 3
SILU = replace(K3, activation="silu")


def tuning(*sizes: fast.Size) -> fast.Tuning:
    return fast.Tuning(sizes=((float("inf"), sizes),))


EIGHT = tuning(fast.Size(tokens=8))
SIXTEEN = tuning(fast.Size(tokens=16))
MIXED = tuning(
    fast.Size(tokens=16, rows=128),
    fast.Size(tokens=16, rest=16, rows=128, warps=8),
    fast.Size(tokens=64, rows=128, warps=4),
)


def weights(experts: int = EXPERTS) -> moe.Experts:
    def one(out: int, into: int) -> moe.Packed:
        return moe.Packed(*mxfp4.quantize(torch.randn(experts, out, into) * into**-0.5))

    return moe.Experts(w1=one(WIDTH, LATENT), w3=one(WIDTH, LATENT), w2=one(LATENT, WIDTH))


def uniform(tokens: int) -> Tensor:
    """Distinct experts a token, at random."""
    return torch.rand(tokens, EXPERTS).argsort(1)[:, :PER_TOKEN].sort(1).values.int()


def experts(
    chosen: Tensor, tuned: fast.Tuning, shape: ModelShape = K3, local: Local = ALL, count: int = EXPERTS
) -> float:
    w, z = weights(count), torch.randn(len(chosen), LATENT)
    share = torch.rand(chosen.shape)
    found = fast.experts(z, chosen, share, w, shape, local, tuning=tuned)
    return relative(found, moe_batch.experts(z, chosen, share, w, shape, local))


def into_columns() -> float:
    """Normalised, as the last columns of wider rows; the others keep their bits. z is part of a projection's row."""
    w, rows, chosen = weights(), torch.randn(9, 64 + LATENT), uniform(9)
    share, norm = torch.rand(chosen.shape), Norm(torch.rand(LATENT), 1e-5)
    z, wide = rows[:, 64:], torch.full((9, 32 + LATENT), 7.0)
    fast.experts(z, chosen, share, w, K3, norm=norm, out=wide[:, 32:])
    right = moe_batch.experts(z, chosen, share, w, K3, norm=norm)
    return relative(wide[:, 32:], right) if bool((wide[:, :32] == 7.0).all()) else 1.0


def scales() -> float:
    """Every scale byte that the kernels promise to be exact for: one group of one weight is not zero, and comes out."""
    worst = 0.0
    for byte in range(27, 161, 19):
        w1 = moe.Packed(torch.zeros(1, WIDTH, LATENT // 2, dtype=torch.uint8), torch.full((1, WIDTH, 4), byte).byte())
        w3, w2 = weights(1).w3, weights(1).w2
        w1.packed[0, :, 5] = torch.arange(WIDTH).byte()
        silu = moe.Experts(w1=w1, w3=w3, w2=w2)
        z = torch.zeros(2, LATENT)
        z[:, 10], z[:, 11] = 2.0 ** (127 - byte), -(2.0 ** (127 - byte))
        given = z, torch.zeros(2, 1).int(), torch.ones(2, 1), silu, SILU
        worst = max(worst, relative(fast.experts(*given, tuning=SIXTEEN), moe_batch.experts(*given)))
    return worst


def route(experts: int, k: int, renormalize: bool) -> float:
    x, gate, bias = torch.randn(20, 32), torch.randn(experts, 32) * 0.2, torch.randn(experts) * 0.1
    found, right = (m.route(x, gate, bias, k, 1.7, renormalize) for m in (fast, moe_batch))
    return relative(found[1], right[1]) if torch.equal(found[0], right[0]) else 1.0


def ties() -> float:
    """Equal scores choose the lowest; a score that is not a number loses."""
    x, gate = torch.zeros(2, 8), torch.zeros(40, 8)
    bias = torch.zeros(40)
    chosen, _ = fast.route(x, gate, bias, 3, 1.0, True)
    bias[:2], bias[30] = float("nan"), 9.0
    odd, share = fast.route(x, gate, bias, 3, 1.0, True)
    right = chosen.tolist() == [[0, 1, 2]] * 2 and odd.tolist() == [[2, 3, 30]] * 2
    return float((share - 1 / 3).abs().max()) if right else 1.0


def repeated() -> float:
    w, z, chosen = weights(), torch.randn(30, LATENT), uniform(30)
    share = torch.rand(chosen.shape)
    first, second = (fast.experts(z, chosen, share, w, K3, tuning=MIXED) for _ in range(2))
    return 0.0 if torch.equal(first, second) else 1.0


def without_work() -> float:
    chosen = torch.tensor([[0, 2]] * 9).int()
    given = torch.randn(9, LATENT), chosen, torch.rand(chosen.shape), weights(2), K3, Local(4, EXPERTS)
    return float(fast.experts(*given, tuning=SIXTEEN).abs().max())


def counted() -> float:
    """Entries counted by a kernel of their own, as for many tokens."""
    most = fast.COUNTED_HERE_MAX
    fast.COUNTED_HERE_MAX = 8
    try:
        return experts(uniform(30), MIXED)
    finally:
        fast.COUNTED_HERE_MAX = most


CASES: dict[str, Callable[[], float]] = {
    "one-token": lambda: experts(uniform(1), EIGHT),
    "eight-a-tile": lambda: experts(uniform(24), EIGHT),
    "uniform": lambda: experts(uniform(40), SIXTEEN),
    "uniform-mixed-sizes": lambda: experts(uniform(40), MIXED),
    "silu": lambda: experts(uniform(10), SIXTEEN, SILU),
    "all-to-one-expert": lambda: experts(torch.full((70, 1), 4).int(), MIXED),
    "skewed": lambda: experts(torch.cat((torch.tensor([[0, 5]] * 50), torch.tensor([[2, 5]] * 20))).int(), MIXED),
    "all-to-all": lambda: experts(torch.arange(EXPERTS).int().expand(3, -1).contiguous(), SIXTEEN),
    "a-rank's-experts": lambda: experts(uniform(25), SIXTEEN, local=Local(2, EXPERTS), count=3),
    "a-rank-without-work": without_work,
    "counted": counted,
    "normed-into-columns": into_columns,
    "scale-bytes": scales,
    "repeated": repeated,
    "route": lambda: route(13, 4, True),
    "route-all": lambda: route(16, 16, False),
    "route-ties": ties,
}

if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(json.dumps({name: case() for name, case in CASES.items()}))

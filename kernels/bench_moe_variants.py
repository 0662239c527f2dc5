"""Launch shapes of the routed experts against each other: each checked, then timed. From these figures
`moe_triton.TUNED` is chosen.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from forebay.kernels import moe_triton
from forebay.kernels.bench_inputs import relative
from forebay.kernels.bench_moe import random_experts, routing
from forebay.kernels.bench_timing import median_ms
from forebay.kernels.models import K3
from forebay.ops.bench_report import Row

DIFFERENCE_MAX = 1e-3  # between launch shapes: another order of the same sums


def rows(device: torch.device, repeats: int) -> Iterator[Row]:
    """Nothing on a CPU: launch shapes mean nothing there."""
    if device.type != "cuda":
        return
    m, latent = K3.moe, K3.moe.latent
    assert latent is not None
    w = random_experts(m.experts, latent, m.width, device)
    for tokens, variants in moe_triton.VARIANTS.items():
        z = torch.randn(tokens, latent, device=device).bfloat16()
        chosen, share = routing(tokens, m.experts, m.per_token, device)
        tuned = {"as it is": moe_triton.TUNED, **variants}
        right = moe_triton.experts(z, chosen, share, w, K3)
        for name, tuning in tuned.items():

            def run(tuning: moe_triton.Tuning = tuning, z: Tensor = z, c: Tensor = chosen, s: Tensor = share) -> Tensor:
                return moe_triton.experts(z, c, s, w, K3, tuning=tuning)

            error = relative(run(), right)
            assert error <= DIFFERENCE_MAX, f"variant {name} is wrong at {tokens} tokens: {error}"
            yield Row(name=f"experts T {tokens}: {name}", value=median_ms(run, device, repeats), unit="ms")

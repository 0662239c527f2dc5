"""Runs the kernels of attention residuals under Triton's interpreter on small random inputs in fp32 and prints each
case's largest relative error against its twin as JSON. A program of its own: TRITON_INTERPRET is read when the kernels
are imported.
"""

import json
from collections.abc import Callable

import torch

from forebay.kernels import attnres_batch as twin
from forebay.kernels import attnres_triton as fast
from forebay.kernels.attnres import Partials
from forebay.kernels.bench_inputs import relative

EPS = 1e-5


def inter(blocks: int, spread: float) -> float:
    """A bank whose rows lie apart, as one cut out of a larger one."""
    bank, ws = torch.randn(blocks, 5, 100)[..., :72], torch.randn(3, 72) * spread
    found, right = (m.inter(bank, ws, EPS) for m in (fast, twin))
    if blocks == 0:
        return 0.0 if all(torch.equal(a, b) for a, b in zip(found, right, strict=True)) else 1.0
    return max(relative(a, b) for a, b in zip(found, right, strict=True))


def merge(blocks: int, add: bool, spread: float = 0.3) -> float:
    bank, ws = torch.randn(blocks, 5, 72), torch.randn(3, 72) * spread
    prefix, output, norm = torch.randn(5, 80)[:, :72], torch.randn(5, 90)[:, 9:81], torch.rand(72) + 0.5
    partial = Partials(*(part.contiguous() for part in twin.inter(bank, ws, EPS).query(1)))
    given = partial, prefix, output if add else None, ws[1], EPS, norm, 1e-6
    found, right = fast.merge(*given), twin.merge(*given)
    return max(relative(a, b) for a, b in zip(found, right, strict=True))


CASES: dict[str, Callable[[], float]] = {
    "inter-one-block": lambda: inter(1, 0.3),
    "inter-eight-blocks": lambda: inter(8, 0.3),
    "inter-far-apart": lambda: inter(8, 30.0),
    "inter-empty-bank": lambda: inter(0, 0.3),
    "merge": lambda: merge(4, True),
    "merge-without-output": lambda: merge(4, False),
    "merge-far-apart": lambda: merge(4, True, 30.0),
    "merge-empty-bank": lambda: merge(0, True),
}

if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(json.dumps({name: case() for name, case in CASES.items()}))

"""What `forebay bench engine` measures, by device, and what others published for the same."""

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from forebay.kernels.models import KIMI_LINEAR_48B, SHAPES
from forebay.kernels.shapes import ModelShape
from forebay.ops.bench_report import Reference
from forebay.workers.demo import TRAINED_FOLDER
from forebay.workers.hf_config import read_config

Mode = Literal["exact", "fast"]
DEMO = "demo"
KI = 1 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`decode`: (sequences, tokens of context each). `prefill`: tokens of one prompt. `warm`: (tokens that are there
    already, new ones). `start`: the first prompt's tokens. `profiled`: the decode rows whose operators are timed, over
    `profiled_steps` steps. Decode rows are of `steps` steps, the others medians of up to `repeats` runs.
    """

    block_tokens: int
    chunk_tokens: int
    steps: int
    repeats: int
    profiled_steps: int = 4
    decode: tuple[tuple[int, int], ...]
    profiled: tuple[tuple[int, int], ...]
    prefill: tuple[int, ...]
    warm: tuple[int, int]
    start: int


WHOLE = Plan(
    block_tokens=512,
    chunk_tokens=8 * KI,
    steps=64,
    repeats=3,
    decode=((1, KI), (8, KI), (32, KI), (128, KI), (1, 32 * KI), (8, 32 * KI), (32, 32 * KI), (1, 128 * KI)),
    profiled=((1, KI), (8, KI), (32, KI), (128, KI), (1, 128 * KI)),
    prefill=(KI, 8 * KI, 32 * KI, 128 * KI),
    warm=(32 * KI, 512),
    start=KI,
)
EXACT = replace(WHOLE, steps=4, repeats=1, profiled_steps=1, prefill=(KI, 8 * KI, 32 * KI))
"""Of the mode that is there to be right: its longest prefill alone takes minutes."""

SMALL = Plan(
    block_tokens=32,
    chunk_tokens=256,
    steps=16,
    repeats=3,
    decode=((1, 256), (8, 256), (32, 256), (1, 2 * KI), (8, 2 * KI)),
    profiled=((1, 256), (8, 256)),
    prefill=(256, KI, 2 * KI),
    warm=(2 * KI, 64),
    start=256,
)


def plan_for(device_type: str, mode: Mode) -> Plan:
    """Everything on a GPU; on a CPU what takes seconds with the demo shape."""
    if device_type != "cuda":
        return SMALL
    return WHOLE if mode == "fast" else EXACT


def shape_of(name: str) -> ModelShape:
    """A shape of the table, or the demo's: that of the built-in trained model."""
    if name != DEMO:
        return SHAPES[name]
    return replace(read_config(TRAINED_FOLDER).shape, name=DEMO)


VLLM = "vLLM 0.26.0, H200"
VLLM_DECODE = MappingProxyType(
    {
        (1, KI): 262.0,
        (8, KI): 927.0,
        (32, KI): 1878.0,
        (128, KI): 4639.0,
        (1, 32 * KI): 248.0,
        (8, 32 * KI): 877.0,
        (32, 32 * KI): 1700.0,
        (1, 128 * KI): 217.0,
    }
)
"""Tokens/s of Kimi Linear's shape, greedy, with CUDA graphs, bf16 weights and fp32 states, by batch and context."""

VLLM_PREFILL_S = MappingProxyType({KI: 0.10, 8 * KI: 0.170, 32 * KI: 0.668, 128 * KI: 4.07})
VLLM_WARM_S = MappingProxyType({(32 * KI, 512): 0.103})
VLLM_START_S = MappingProxyType({"cold": 75.0, "warm": 33.0})


def published(shape: ModelShape, value: float | None) -> Reference | None:
    """vLLM's figure, for the shape that it was measured with."""
    return Reference(name=VLLM, value=value) if value is not None and shape.name == KIMI_LINEAR_48B.name else None

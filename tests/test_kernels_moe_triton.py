"""The kernels of routed experts without a GPU: right under Triton's interpreter, compiled for sm_90 within its limits,
and their instructions for unpacking MXFP4 followed one by one.
"""

import importlib.util
import re

import pytest
import torch
from torch import Tensor

from forebay.kernels import moe_columns, mxfp4
from tests.triton_scripts import RELATIVE_ERROR_MAX, fits, names, told

STORES_MAX = 32  # to shared memory: what the way out of a tile takes, with room

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, object]:
    return told("triton_moe_cases.py", TRITON_INTERPRET="1")


@pytest.fixture(scope="module")
def compiled() -> dict[str, object]:
    return told("triton_moe_compile.py")


@pytest.mark.parametrize("case", names("triton_moe_cases.py", "CASES"))
def test_kernel_equals_its_twin(interpreted: dict[str, float], case: str) -> None:
    assert interpreted[case] <= RELATIVE_ERROR_MAX


@pytest.mark.parametrize("kernel", names("triton_moe_compile.py", "LAUNCHES"))
def test_kernel_fits_the_device(compiled: dict[str, dict[str, int]], kernel: str) -> None:
    fits(compiled[kernel])
    if kernel.startswith(("gate-up", "down")):
        assert compiled[kernel]["HGMMA"] + compiled[kernel]["HMMA"] > 0, "the tensor cores take the weights"
        assert compiled[kernel]["STS"] < STORES_MAX, "unpacked weights stay in registers"


@pytest.mark.parametrize(("side", "first"), [(1, [0, 4, 32, 36, 64, 68, 96, 100, 8, 12]), (2, [0, 4, 8, 12, 32, 36])])
def test_columns_are_each_in_one_place(side: int, first: list[int]) -> None:
    order = moe_columns.order(384, side)
    assert order.sort().values.tolist() == list(range(384))
    assert (order[:32] % 4 == 0).all()
    assert order[: len(first)].tolist() == first


WORD = 0xFFFFFFFF


def bf16(bits: Tensor) -> Tensor:
    """[n] words as bf16 [n, 2], low half first."""
    halves = torch.stack((bits & 0xFFFF, bits >> 16), 1)
    return (halves << 16).to(torch.int32).view(torch.float32)


def times(a: Tensor, b: Tensor) -> Tensor:
    """mul.bf16x2: each half's product, subnormals kept, rounded to bf16."""
    made = (bf16(a).double() * bf16(b).double()).to(torch.bfloat16).view(torch.int16).long() & 0xFFFF
    return made[:, 0] | made[:, 1] << 16


OPERATIONS = {
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shl.b32": lambda a, b: a << b & WORD,
    "shr.u32": lambda a, b: a >> b,
    "mul.lo.u32": lambda a, b: a * b & WORD,
    "mul.bf16x2": times,
}


def followed(code: str, registers: dict[str, Tensor]) -> dict[str, Tensor]:
    """The registers after straight-line code of OPERATIONS."""
    for line in re.findall(r"^([a-z][a-z0-9.]+) (.*);", code, re.MULTILINE):
        operation, (to, *given) = line[0], line[1].split(", ")
        registers[to] = OPERATIONS[operation](*(registers[g] if g in registers else int(g, 0) for g in given))
    return registers


@pytest.mark.parametrize("byte", [27, 28, 64, 110, 127, 128, 129, 160])
def test_unpacking_instructions_give_every_code_exactly(byte: int) -> None:
    """All bytes at all four places, at scales through all that is promised, against the table of codes."""
    from forebay.kernels import mxfp4_triton

    packed = torch.stack([torch.arange(256).roll(83 * i) for i in range(4)], 1)
    words = sum(packed[:, i] << 8 * i for i in range(4))
    multiplier = torch.full_like(words, (min(byte + 126 - mxfp4_triton.DOWN.value, 255) << 7) * 0x10001)
    found = followed(mxfp4_triton.UNPACK.value, {"$4": words, "$5": multiplier})
    codes = torch.tensor(mxfp4.CODES, dtype=torch.float64)
    scale = 2.0 ** (byte - 127 - mxfp4_triton.DOWN.value)
    for nibble in range(4):
        right = codes[torch.stack((words, words >> 16), 1) >> 4 * nibble & 15] * scale
        assert torch.equal(bf16(found[f"${nibble}"]).double(), right)

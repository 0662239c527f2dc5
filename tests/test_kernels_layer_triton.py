"""The engine's own kernels without a GPU: right under Triton's interpreter, compiled for sm_90 within its limits."""

import importlib.util

import pytest

from tests.triton_scripts import RELATIVE_ERROR_MAX, fits, names, told

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, object]:
    return told("triton_layer_cases.py", TRITON_INTERPRET="1")


@pytest.fixture(scope="module")
def compiled() -> dict[str, object]:
    return told("triton_layer_compile.py")


@pytest.mark.parametrize("case", names("triton_layer_cases.py", "CASES"))
def test_kernel_equals_its_twin(interpreted: dict[str, float], case: str) -> None:
    assert interpreted[case] <= RELATIVE_ERROR_MAX


@pytest.mark.parametrize("kernel", names("triton_layer_compile.py", "LAUNCHES"))
def test_kernel_fits_the_device(compiled: dict[str, dict[str, int]], kernel: str) -> None:
    fits(compiled[kernel])
    if kernel.startswith(("gate-up", "down")):
        assert compiled[kernel]["HGMMA"] > 0, "the tensor cores take the weights"

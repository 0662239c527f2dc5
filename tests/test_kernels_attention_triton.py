"""The attention kernels without a GPU: right under Triton's interpreter, compiled for sm_90 within its limits."""

import importlib.util

import pytest

from tests.triton_scripts import RELATIVE_ERROR_MAX, TESTS, fits, names, told

GOLDEN = TESTS.parents[1] / "shared" / "golden" / "dsa"
CASES, COMPILED = "triton_attention_cases.py", "triton_attention_compile.py"

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, object]:
    return told(CASES, TRITON_INTERPRET="1")


@pytest.fixture(scope="module")
def compiled() -> dict[str, object]:
    return told(COMPILED)


@pytest.mark.parametrize("case", names(CASES, "CASES"))
def test_kernel_equals_its_twin(interpreted: dict[str, float], case: str) -> None:
    assert interpreted[case] <= RELATIVE_ERROR_MAX


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="the golden data are not beside the repository")
def test_kernels_equal_independent_figures() -> None:
    for name, error in told(CASES, TRITON_INTERPRET="1", GOLDEN=str(GOLDEN)).items():
        assert error <= RELATIVE_ERROR_MAX, name


@pytest.mark.soak
def test_kernels_equal_their_twins_at_large_shapes() -> None:
    errors = told(CASES, TRITON_INTERPRET="1", LARGE="1")
    assert set(errors) == set(names(CASES, "LARGE"))
    assert max(errors.values()) <= RELATIVE_ERROR_MAX


@pytest.mark.parametrize("kernel", names(COMPILED, "LAUNCHES"))
def test_kernel_fits_the_device(compiled: dict[str, dict[str, int]], kernel: str) -> None:
    fits(compiled[kernel])
    if kernel.startswith(("latent-96", "slots-96", "prefill")):
        assert compiled[kernel]["HGMMA"] > 0, "products run on the tensor cores of Hopper"


@pytest.mark.soak
def test_other_launch_shapes_fit_the_device() -> None:
    for taken in told(COMPILED, LARGE="1").values():
        fits(taken)

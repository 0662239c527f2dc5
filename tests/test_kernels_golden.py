"""The operators against numbers of independent implementations, at those sets' tolerances."""

from pathlib import Path

import pytest
import torch

from forebay.kernels import golden

GOLDEN = Path(__file__).resolve().parents[1].parent / "shared" / "golden"
CASES = {"kda": 78, "dsa": 44, "moe": 21, "mxfp4": 6}


@pytest.mark.parametrize("name", golden.SETS)
def test_every_case_of_the_set_passes(name: str) -> None:
    folder = GOLDEN / name
    if not folder.is_dir():
        pytest.skip("no golden data beside the repository")
    cases = golden.run_set(folder)
    assert [case for case in cases if case.passed is False] == []
    assert sum(case.passed is True for case in cases) == CASES[name]


@pytest.mark.parametrize(("found", "error"), [(1.5, 0.5), (float("nan"), float("inf")), (float("inf"), float("inf"))])
def test_a_wrong_number_is_a_failure(found: float, error: float) -> None:
    case = golden.compare("planted", torch.tensor([found, 2.0]), torch.tensor([1.0, 2.0]), 0.1)
    assert (case.error, case.passed) == (error, False)


def test_equal_infinities_and_nans_are_no_error() -> None:
    x = torch.tensor([float("nan"), float("-inf"), 1.0])
    assert golden.compare("same", x, x.clone(), 0.0).passed


def test_another_shape_is_no_comparison() -> None:
    with pytest.raises(AssertionError, match="planted"):
        golden.compare("planted", torch.zeros(2), torch.zeros(1, 2), 1.0)

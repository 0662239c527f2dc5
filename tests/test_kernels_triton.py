"""The CUDA kernels without a GPU: right under Triton's interpreter, and compiled for sm_90 within its limits."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
SHARED_BYTES_MAX = 232_448  # of one block on sm_90
RELATIVE_ERROR_MAX = 1e-5

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)


def names(script: str, table: str) -> list[str]:
    """Keys of a table that a script states, read without importing it."""
    for node in ast.parse((TESTS / script).read_text()).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == table:
            assert isinstance(node.value, ast.Dict)  # type: ignore[union-attr]
            return [ast.literal_eval(key) for key in node.value.keys]  # type: ignore[union-attr]
    raise AssertionError(f"{script} states no {table}")


def told(script: str, **environment: str) -> dict[str, object]:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, str(TESTS / script)],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def interpreted() -> dict[str, object]:
    return told("triton_cases.py", TRITON_INTERPRET="1")


@pytest.fixture(scope="module")
def compiled() -> dict[str, object]:
    return told("triton_compile.py")


@pytest.mark.parametrize("case", names("triton_cases.py", "CASES"))
def test_kernel_equals_its_twin(interpreted: dict[str, float], case: str) -> None:
    assert interpreted[case] <= RELATIVE_ERROR_MAX


@pytest.mark.parametrize("kernel", names("triton_compile.py", "LAUNCHES"))
def test_kernel_fits_the_device(compiled: dict[str, dict[str, int]], kernel: str) -> None:
    taken = compiled[kernel]
    assert taken["shared"] <= SHARED_BYTES_MAX
    assert (taken["spills"], taken["STACK"], taken["LOCAL"]) == (0, 0, 0)

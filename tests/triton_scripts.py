"""Programs beside the tests that Triton needs in processes of their own, and the limits that a kernel must keep."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
SHARED_BYTES_MAX = 232_448  # of one block on sm_90
RELATIVE_ERROR_MAX = 1e-5


def names(script: str, table: str) -> list[str]:
    """Keys of a table that a script states, read without importing it."""
    for node in ast.parse((TESTS / script).read_text()).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == table:
            assert isinstance(node.value, ast.Dict)  # type: ignore[union-attr]
            return [ast.literal_eval(key) for key in node.value.keys]  # type: ignore[union-attr]
    raise AssertionError(f"{script} states no {table}")


def told(script: str, **environment: str) -> dict[str, object]:
    """The JSON that a script prints last."""
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


def fits(taken: dict[str, int]) -> None:
    """Shared memory within what a block has, and nothing spilt."""
    assert taken["shared"] <= SHARED_BYTES_MAX
    assert (taken["spills"], taken["STACK"], taken["LOCAL"]) == (0, 0, 0)

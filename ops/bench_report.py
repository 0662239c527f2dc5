"""The one form in which every measurement is told: a table for people, JSON for programs.

{"machine": {...}, "versions": {...}, "rows": [{"name", "value", "unit", "reference", "ratio"}]}
"""

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("forebay", "ray", "torch", "triton", "numpy", "mooncake-transfer-engine-non-cuda", "uvicorn", "aiohttp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What a value is measured against: its name and its value in the row's unit."""

    name: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure. `ratio` is value / reference."""

    name: str
    value: float
    unit: str
    reference: Reference | None = None

    @property
    def ratio(self) -> float | None:
        return self.value / self.reference.value if self.reference and self.reference.value else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Figures with the machine and the versions they hold for."""

    machine: dict[str, Any]
    versions: dict[str, str]
    rows: tuple[Row, ...]


def report(rows: Iterable[Row]) -> Report:
    """The rows, on this machine."""
    return Report(machine=machine(), versions=versions(), rows=tuple(rows))


def to_json(made: Report) -> dict[str, Any]:
    return {"machine": made.machine, "versions": made.versions, "rows": [_row(row) for row in made.rows]}


def write_json(made: Report, path: Path) -> None:
    path.write_text(json.dumps(to_json(made), indent=1) + "\n")


def table(made: Report) -> str:
    """Machine and versions on a line each, then a line a row, columns aligned."""
    facts = (made.machine, made.versions)
    head = [", ".join(f"{key} {value}" for key, value in some.items() if value is not None) for some in facts]
    cells = [("", "value", "unit", "reference", "ratio"), *map(_cells, made.rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ["  ".join(_aligned(row, widths)).rstrip() for row in cells]
    return "\n".join([*head, "", *lines])


def machine() -> dict[str, Any]:
    """Facts of this machine that a figure depends on. `gpus` is None where there are none."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": _gpus(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Versions of the packages that matter to figures, of those installed."""
    installed = {}
    for name in PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _gpus() -> list[str] | None:
    """Names and memory, as the driver's own tool tells them."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return [line.strip() for line in told.splitlines() if line.strip()] or None


def _row(row: Row) -> dict[str, Any]:
    reference = None if row.reference is None else {"name": row.reference.name, "value": row.reference.value}
    return {"name": row.name, "value": row.value, "unit": row.unit, "reference": reference, "ratio": row.ratio}


def _cells(row: Row) -> tuple[str, ...]:
    reference = f"{row.reference.name} {_number(row.reference.value)}" if row.reference else ""
    return row.name, _number(row.value), row.unit, reference, "" if row.ratio is None else f"{row.ratio:.3f}"


def _number(value: float) -> str:
    """Whole numbers whole, others to four significant digits."""
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Numbers to the right, words to the left."""
    return [c.rjust(w) if i in (1, 4) else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]

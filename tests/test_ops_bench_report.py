"""The one form of figures: its JSON keys, its ratio, its table."""

import json
import sys
from pathlib import Path

import pytest

from forebay.ops import bench_report
from forebay.ops.bench_report import Reference, Row, report, table, to_json, write_json

ROWS = [
    Row(name="decode", value=250.0, unit="tokens/s", reference=Reference(name="torch", value=100.0)),
    Row(name="first token", value=0.012345, unit="s"),
    Row(name="nothing to compare", value=3, unit="GB", reference=Reference(name="none", value=0.0)),
]


def test_json_has_the_one_form(tmp_path: Path) -> None:
    write_json(report(ROWS), tmp_path / "r.json")
    told = json.loads((tmp_path / "r.json").read_text())
    assert set(told) == {"machine", "versions", "rows"}
    assert told == to_json(report(ROWS))
    assert told["rows"][0] == {
        "name": "decode",
        "value": 250.0,
        "unit": "tokens/s",
        "reference": {"name": "torch", "value": 100.0},
        "ratio": 2.5,
    }
    assert told["rows"][1]["reference"] is None
    assert told["rows"][1]["ratio"] is None
    assert told["rows"][2]["ratio"] is None


def test_machine_and_versions_are_facts() -> None:
    made = report([])
    assert made.machine["cores"] >= 1
    assert made.machine["memory_bytes"] > 1 << 28
    assert made.machine["cpu"]
    assert made.versions["aiohttp"]
    assert "forebay" in made.versions


def test_the_table_aligns_and_says_every_figure() -> None:
    lines = table(report(ROWS)).splitlines()
    assert lines[0].startswith("cpu ")
    decode = next(line for line in lines if line.startswith("decode"))
    assert decode.split() == ["decode", "250", "tokens/s", "torch", "100", "2.500"]
    assert "0.01235" in next(line for line in lines if line.startswith("first token"))
    header = next(line for line in lines if "reference" in line)
    assert decode.index("torch") == header.index("reference")


def test_gpus_are_what_the_drivers_tool_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!{sys.executable}\nprint('Some GPU, 1024 MiB')\nprint('Some GPU, 1024 MiB')\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bench_report.machine()["gpus"] == ["Some GPU, 1024 MiB"] * 2
    tool.write_text(f"#!{sys.executable}\nraise SystemExit(9)\n")
    assert bench_report.machine()["gpus"] is None
    tool.unlink()
    assert bench_report.machine()["gpus"] is None

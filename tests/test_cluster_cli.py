"""The command line: every verb, errors of one line, and verbs that need neither Ray nor HTTP."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from endpoint import FOREBAY

from forebay.cluster import check
from forebay.cluster.cli import main, make_parser
from forebay.cluster.start_checks import available_bytes

BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names}:
            raise ImportError(f"{{name}} is blocked")
sys.meta_path.insert(0, Blocked())
from forebay.cluster.cli import main
sys.exit(main({words}))
"""
RAY_AND_HTTP = ("ray", "starlette", "uvicorn", "uvloop", "httptools", "aiohttp", "redis", "prometheus_client")
TORCH = ("torch", "triton")
GOLDEN = Path(__file__).resolve().parents[1].parent / "shared" / "golden"


def without(names: tuple[str, ...], *words: str) -> "subprocess.CompletedProcess[str]":
    code = BLOCKED.format(names=names, words=list(words))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "words",
    [
        ("shapes", "k3.1-pro"),
        ("route", "some session"),
        ("config", "check"),
        ("--help",),
        ("check", "--help"),
        ("up", "--help"),
    ],
    ids=" ".join,
)
def test_verbs_that_need_no_ray_no_http_and_no_torch(words: tuple[str, ...]) -> None:
    result = without(RAY_AND_HTTP + TORCH, *words)
    assert result.returncode == 0, result.stderr
    assert result.stdout


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="the golden data does not lie beside this checkout")
def test_check_golden_needs_no_ray_and_no_http(tmp_path: Path) -> None:
    (tmp_path / "mxfp4").symlink_to(GOLDEN / "mxfp4")
    result = without(RAY_AND_HTTP, "check", "golden", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].endswith("passed, 0 failed")


def test_the_block_bites() -> None:
    assert without(("ray",), "status").returncode == 1, "status needs no ray, and finds nobody"
    assert "blocked" in without(("aiohttp",), "replay", "--help").stderr


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out.strip() == f"forebay {version('forebay')}"


def test_every_verb_is_listed() -> None:
    listed = make_parser().format_help()
    for verb in ("up", "status", "chat", "route", "shapes", "config", "check", "replay", "bench"):
        assert f"\n    {verb} " in listed


def test_every_flag_of_up_has_a_key_of_the_same_name() -> None:
    from dataclasses import fields

    from forebay.cluster.config import EndpointConfig
    from forebay.cluster.config_file import TABLES

    flags = set(vars(make_parser().parse_args(["up", *_all_flags()]))) - {"verb", "config"}
    assert flags
    keys = {field.name for field in fields(EndpointConfig)}
    assert flags <= keys | {f"{name}.{each.name}" for name, (table, _) in TABLES.items() for each in fields(table)}


def _all_flags() -> list[str]:
    text = subprocess.run([FOREBAY, "up", "--help"], capture_output=True, text=True)
    names = {word.strip("[],") for word in text.stdout.split() if word.startswith(("--", "[--"))} - {"--help"}
    return [word for name in sorted(names) for word in (name, "1")]


def test_route_prints_primary_and_backup(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["route", "a session"]) == 0
    primary, backup = (line.split()[1] for line in capsys.readouterr().out.splitlines())
    assert {primary, backup} == {"c1", "c2"}
    assert main(["route", "a session", "--clusters", "1"]) == 0
    assert capsys.readouterr().out.split() == ["primary", "c1", "backup", "-"]


def test_a_wrong_configuration_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "site.toml"
    path.write_text("clusterz = 2")
    assert main(["config", "check", str(path)]) == 1
    out, errors = capsys.readouterr()
    assert not out
    assert errors.splitlines() == [f"forebay: {path}: clusterz: no such key (did you mean clusters?)"]


def test_nobody_at_the_url_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("status", "chat"):
        assert main([verb, "--url", "http://127.0.0.1:9"]) == 1
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_tally_counts_and_decides_the_status(capsys: pytest.CaptureFixture[str]) -> None:
    tally = check.Tally()
    tally.line(True, "one", "fine")
    tally.line(None, "two", "not run")
    assert tally.close() == 0
    tally.line(False, "three", "off by one")
    assert tally.close() == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["pass", "----", "1", "FAIL", "1"]
    assert (lines[2], lines[4]) == ("1 passed, 0 failed", "1 passed, 1 failed")
    assert check.Tally().close() == 1, "a check that ran no case has shown nothing"


def test_golden_failures_end_in_status_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from forebay.kernels.golden import Case
    from forebay.workers import golden

    def cases(_: Path, device: str) -> list[Case]:
        return [Case(name="a", error=2.0, tolerance=1.0, passed=False, detail="")]

    monkeypatch.setattr(golden, "check_golden", cases)
    assert main(["check", "golden", str(tmp_path)]) == 1


def test_a_folder_without_golden_sets_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "golden", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_bench_prints_a_table_and_writes_the_one_form(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from forebay.ops.bench_report import Reference, Row
    from forebay.workers import bench

    rows = [Row(name="decode", value=100.0, unit="tokens/s", reference=Reference(name="before", value=50.0))]
    monkeypatch.setattr(bench, "bench_workers", lambda model, threads: rows)
    assert main(["bench", "demo", "--json", str(tmp_path / "out.json")]) == 0
    assert "decode" in capsys.readouterr().out
    made = json.loads((tmp_path / "out.json").read_text())
    assert set(made) == {"machine", "versions", "rows"}
    wanted = {"name": "decode", "value": 100.0, "unit": "tokens/s", "reference": {"name": "before", "value": 50.0}}
    assert made["rows"] == [wanted | {"ratio": 2.0}]


def test_bench_store_measures_the_ssd_beside_plain_files_and_the_pool_beside_its_client(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from forebay.cluster import bench_lookup
    from forebay.kvstore import host_bench, pool_bench, ssd_bench

    for name, small in (("PROMPT_TOKENS", 1 << 13), ("ROUNDS", 1), ("COPIED_BYTES", 32 << 20)):
        monkeypatch.setattr(bench_lookup, name, small)
    for name, small in (("ROUNDS", 1), ("UNITS", 2)):
        monkeypatch.setattr(host_bench, name, small)
    for name, small in (("ROUNDS", 1), ("RECORD_BYTES", 1 << 16), ("QUEUE_BYTES", 1 << 20)):
        monkeypatch.setattr(ssd_bench, name, small)
    for name, small in (("ROUNDS", 1), ("OBJECTS", 2), ("OBJECT_BYTES", 1 << 16)):
        monkeypatch.setattr(pool_bench, name, small)
    assert main(["bench", "store", "--folder", str(tmp_path), "--json", str(tmp_path / "out.json")]) == 0
    rows = {row["name"]: row for row in json.loads((tmp_path / "out.json").read_text())["rows"]}
    assert any("plain sequential write" in row["reference"]["name"] for row in rows.values() if row["reference"])
    assert all(row["value"] > 0 for row in rows.values())
    assert sum(name.startswith("host, ") for name in rows) == 3
    own_client = [row for row in rows.values() if row["reference"] and "own client" in row["reference"]["name"]]
    assert len(own_client) == 2 or "Mooncake" in capsys.readouterr().err
    capsys.readouterr()
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"], "it leaves nothing behind"
    assert main(["bench", "store", "--folder", str(tmp_path / "none")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_available_memory_is_the_smaller_of_machine_and_group(tmp_path: Path) -> None:
    proc = tmp_path / "meminfo"
    proc.write_text("MemTotal: 100 kB\nMemAvailable: 50 kB\n")
    assert available_bytes(proc, tmp_path) == 50 << 10
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(proc, tmp_path) == 50 << 10
    (tmp_path / "memory.max").write_text("30720\n")
    (tmp_path / "memory.current").write_text("10240\n")
    assert available_bytes(proc, tmp_path) == 20 << 10

"""`forebay bench engine`: every row it promises, where nothing but torch is installed; and its pure parts."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from forebay.cluster.cli import main
from forebay.kernels import floors
from forebay.kernels.models import KIMI_LINEAR_48B
from forebay.workers import bench_engine, cache_rate, engine_plan, engine_start
from forebay.workers.engine_make import make_engine
from forebay.workers.engine_plan import DEMO, SMALL, WHOLE, Mode, shape_of
from forebay.workers.engine_rows import EngineBench, count

CPU = torch.device("cpu")
BLOCKED = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"ray", "starlette", "uvicorn", "uvloop", "httptools", "aiohttp", "msgspec", "redis",
                                  "prometheus_client", "blake3", "xxhash", "tokenizers", "tiktoken", "mooncake"}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
from dataclasses import replace
from forebay.workers import bench_engine, engine_plan
engine_plan.SMALL = replace(engine_plan.SMALL, steps=2, repeats=1, decode=((1, 64), (8, 64)), profiled=((8, 64),),
                            prefill=(96,), chunk_tokens=64, warm=(96, 32))
sys.argv = ["bench", "--device", "cpu", "--parts", "decode", "prefill", "warm", "--json", sys.argv[1]]
raise SystemExit(bench_engine.main())
"""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_every_row_where_nothing_but_torch_is_installed(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    ran = subprocess.run([sys.executable, "-c", BLOCKED, str(record)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-2000:]
    told = json.loads(record.read_text())
    assert {"machine", "versions", "rows"} <= told.keys()
    rows = {row["name"]: row for row in told["rows"]}
    assert all(name.endswith(", exact") and row["value"] > 0 for name, row in rows.items())
    for name in (
        "decode, batch 1, made-up contexts of 64",
        "decode step, batch 8, made-up contexts of 64",
        "part of a step, batch 8, made-up contexts of 64: routed experts",
        "prefill, a prompt of 96",
        "link for the handoff, a prompt of 96",
        "warm prefill, 32 tokens after a made-up prefix of 96",
    ):
        assert f"{name}, exact" in rows
    met = rows["distinct experts a layer, batch 1, made-up contexts of 64, exact"]
    assert (met["value"], met["unit"], met["reference"]["value"]) == (4, "of 16", pytest.approx(4))
    step = rows["decode step, batch 8, made-up contexts of 64, exact"]["value"]
    assert rows["decode, batch 8, made-up contexts of 64, exact"]["value"] == pytest.approx(8e3 / step)
    parts = [name for name in rows if name.startswith("part of a step")]
    assert len(parts) == 9, "every operator, and what is none"
    assert ran.stderr.count(" s  ") == len(rows), "every row is told as soon as it is there"


def test_it_prefills_and_decodes_as_the_model_does() -> None:
    """The token after a prompt in chunks is the one after the whole prompt; a step's experts follow from its ids."""
    shape = shape_of(DEMO)
    engine = make_engine("exact", shape, SMALL, CPU)
    assert isinstance(engine.layout.block_tokens, int)
    ids = torch.arange(300) % shape.vocab
    tokens = []
    for _ in range(2):
        contexts = engine_start.empty_contexts(engine.layout, CPU, 1, 300)
        tokens.append(engine.prefill(contexts, ids, 0))
    contexts = engine_start.empty_contexts(engine.layout, CPU, 1, 300)
    engine.prefill(contexts, ids[:256], 0)
    assert [*tokens, engine.prefill(contexts, ids[256:], 256)] == [tokens[0]] * 3
    made = engine.made_contexts(3, 64, 96)
    one, other = (torch.cat(engine.chosen(made, torch.full((3,), at))) for at in (1, 2))
    assert not torch.equal(one, other)


def test_floors_stand_beside_figures_of_a_gpu_alone() -> None:
    bench = EngineBench(make_engine("exact", shape_of(DEMO), SMALL, CPU), KIMI_LINEAR_48B, WHOLE, torch.device("cuda"))
    work = floors.step_work(KIMI_LINEAR_48B, 8, 1024)
    reference = bench._floor(work)
    assert reference is not None
    assert reference.value == pytest.approx(5.85, rel=0.01)
    rows = list(bench._operators({"routed experts": 3.5, "head": 0.5, "norms": 1.0}, work, "x"))
    assert [row.name for row in rows] == [
        "part of a step, x: routed experts, exact",
        "part of a step, x: norms, exact",
        "part of a step, x: head, exact",
    ]
    assert rows[0].reference is not None
    assert rows[0].reference.value == pytest.approx(work["routed experts"].n_bytes / 4.26e9)
    assert (rows[1].value, rows[1].reference) == (1.0, None)


def test_every_published_figure_has_its_row() -> None:
    assert set(engine_plan.VLLM_DECODE) == set(WHOLE.decode)
    assert set(engine_plan.VLLM_PREFILL_S) == set(WHOLE.prefill)
    assert set(engine_plan.VLLM_WARM_S) == {WHOLE.warm}
    assert engine_plan.published(KIMI_LINEAR_48B, 1.0) is not None
    assert engine_plan.published(shape_of(DEMO), 1.0) is None
    assert all(shape_of(name).name == name for name in bench_engine.SHAPES)


def test_the_record_holds_every_decode_and_prefill_of_kimi_linear() -> None:
    """As measured on an H200; its floors are those of today, for the experts that were met."""
    told = json.loads((Path(bench_engine.__file__).parent / "bench_engine_h200.json").read_text())
    assert any("NVIDIA H200" in gpu for gpu in told["machine"]["gpus"])
    rows = {row["name"]: row for row in told["rows"]}
    for batch, tokens in WHOLE.decode:
        what = f"batch {batch}, made-up contexts of {count(tokens)}, fast"
        met = rows[f"distinct experts a layer, {what}"]["value"]
        least = floors.floor_ms(floors.step_work(KIMI_LINEAR_48B, batch, tokens, met), floors.H200)
        step = rows[f"decode step, {what}"]
        assert least < step["value"]
        assert step["reference"] == {"name": "H200 floor", "value": pytest.approx(least)}
        assert met == pytest.approx(floors.distinct_experts(KIMI_LINEAR_48B.moe, batch), rel=0.02)
    assert {f"prefill, a prompt of {count(tokens)}, fast" for tokens in WHOLE.prefill} < rows.keys()


def test_the_link_that_a_prefill_needs() -> None:
    """32k tokens of Kimi Linear in a second: 7 layers of 1152 bytes a token; 20 of 2 MiB and a tail a state. Two are
    kept: at the end, and a block before it."""
    rows, state = 32_768 * 7 * 1152, 20 * (2 * 1024**2 + 3 * 3 * 4096 * 2)
    found = cache_rate.rates(KIMI_LINEAR_48B, 512, 32_768, 1.0)
    assert found["link for the handoff"] == pytest.approx((rows + state) / 1e9)
    assert found["link for DRAM or SSD, written through"] == pytest.approx((rows + 2 * state) / 1e9)
    assert found["link for the pool, 2 copies written through"] == pytest.approx(2 * (rows + 2 * state) / 1e9)
    assert cache_rate.rates(KIMI_LINEAR_48B, 512, 32_768, 2.0)["cache made"] == pytest.approx((rows + state) / 2e9)


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in the place of Python: what it writes and how it ends is the test's to say."""
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "first token $5 $TRITON_CACHE_DIR"\n')
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    return program


def test_a_start_is_timed_until_the_token_is_there(child: Path) -> None:
    mode: Mode = "exact"
    rows = list(engine_start.start_rows(KIMI_LINEAR_48B, mode, "cuda"))
    assert [row.name for row in rows] == [
        "start to first token, compile caches empty, exact",
        "start to first token, compile caches filled, exact",
    ]
    assert [row.reference.value for row in rows if row.reference] == [75.0, 33.0]
    child.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(subprocess.CalledProcessError):
        list(engine_start.start_rows(KIMI_LINEAR_48B, mode, "cuda"))


def test_a_started_process_says_its_token(capsys: pytest.CaptureFixture[str]) -> None:
    assert engine_start.main(DEMO, "exact", "cpu") == 0
    token = int(capsys.readouterr().out.removeprefix("first token "))
    assert 0 <= token < shape_of(DEMO).vocab


def test_what_cannot_run_here_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", "--shape", "k3.1-slice", "--device", "cpu"]) == 2
    assert "need a GPU" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["bench", "engine", "--device", "cuda"]) == 2
        assert "sees no GPU" in capsys.readouterr().err

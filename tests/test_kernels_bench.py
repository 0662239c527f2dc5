"""`forebay bench kernels` where nothing but torch is installed, and plans."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from forebay.kernels import bench, bench_moe, moe_batch
from forebay.kernels.bench_inputs import relative
from forebay.kernels.kda_plan import CHUNK, make_plan, segments_to_fill
from forebay.kernels.models import K3

BLOCKED = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in "ray starlette uvicorn aiohttp msgspec redis prometheus_client fla".split():
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
sys.argv = ["bench", "--repeats", "1", "--json", sys.argv[1]]
from forebay.kernels.bench import main
raise SystemExit(main())
"""


def test_bench_needs_neither_ray_nor_http(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    ran = subprocess.run([sys.executable, "-c", BLOCKED, str(record)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    told = json.loads(record.read_text())
    assert {"machine", "versions", "rows"} <= told.keys()
    for operator in (
        "prefill T",
        "sparse attention",
        "index scores",
        "top-k",
        "experts T",
        "residuals merge",
        "slice of 4",
    ):
        assert any(row["name"].startswith(operator) for row in told["rows"])


def test_compare_divides_second_by_first(tmp_path: Path) -> None:
    paths = tmp_path / "a.json", tmp_path / "b.json"
    for path, value in zip(paths, (2.0, 3.0), strict=True):
        path.write_text(json.dumps({"rows": [{"name": "step", "value": value}]}))
    assert bench.compare(*paths).splitlines()[1].split() == ["step", "2", "3", "1.500"]


def test_record_names_its_machine() -> None:
    told = json.loads((Path(bench.__file__).parent / "bench_h200.json").read_text())
    assert any("NVIDIA H200" in gpu for gpu in told["machine"]["gpus"])
    assert {"torch", "triton"} <= told["versions"].keys()


def test_plan_covers_every_token_once() -> None:
    plan = make_plan((150, 64, 5), ((32, 100), (64,), ()), segments=2)
    spans = list(zip(plan.chunk_start.tolist(), plan.chunk_rows.tolist(), strict=True))
    assert [t for start, rows in spans for t in range(start, start + rows)] == list(range(219))
    assert max(rows for _, rows in spans) <= CHUNK
    ends = {
        start + rows: slot for (start, rows), slot in zip(spans, plan.chunk_slot.tolist(), strict=True) if slot >= 0
    }
    assert ends == {32: 0, 100: 1, 214: 2}
    assert plan.segment_first.tolist()[-1] == plan.chunks
    assert [n for n in plan.segment_final.tolist() if n >= 0] == [0, 1, 2]


def test_spans_cover_every_chunk_once_and_go_on_where_sequences_do() -> None:
    plan = make_plan((75, 32, 3), span_tokens=2 * CHUNK)
    chunks = [c for span in plan.spans for c in range(span.first, span.first + span.chunks)]
    assert chunks == list(range(plan.chunks))
    assert [span.segment_first.tolist() for span in plan.spans] == [[0, 2], [0, 1, 2], [0, 1]]
    assert [span.segment_final.tolist() for span in plan.spans] == [[0], [0, 1], [2]]
    assert [span.segment_goes_on.tolist() for span in plan.spans] == [[0], [1, 0], [0]]
    assert len(make_plan((75, 32, 3)).spans) == 1


def test_a_lone_sequence_goes_in_short_spans_and_many_in_long_ones() -> None:
    assert [span.chunks * CHUNK for span in make_plan((8192,)).spans] == [2048] * 4
    assert len(make_plan((1024,) * 8).spans) == 1
    assert max(span.chunks * CHUNK for span in make_plan((8192,) * 9).spans) == 32_768
    assert len(make_plan((8192,), segments=8).spans) == 1


def test_plan_refuses_checkpoints_outside() -> None:
    with pytest.raises(AssertionError, match="inside"):
        make_plan((10,), ((11,),))


def test_sequences_are_cut_only_where_heads_do_not_fill() -> None:
    assert segments_to_fill((8192,), 96, 132) == 1
    assert segments_to_fill((8192,), 12, 132) == 8
    assert segments_to_fill((600,), 12, 132) == 1


def test_experts_are_checked_and_their_floor_is_counted() -> None:
    cpu = torch.device("cpu")
    w = bench_moe.random_experts(16, 128, 256, cpu)
    chosen, share = bench_moe.routing(9, 16, 4, cpu)
    z = torch.randn(9, 128)
    assert relative(moe_batch.experts(z, chosen, share, w, K3), bench_moe.gold(z, chosen, share, w, K3)) < 1e-5
    assert [row.name for row in bench_moe.check_against_gold(w, 4, K3)] == [
        f"experts error, T {tokens}" for tokens in bench_moe.CHECKED_TOKENS
    ]
    one_expert = 3 * 128 * 256 // 32 * 17
    assert bench_moe.floor_ms(5, 1, 4, w) == pytest.approx((5 * one_expert + 2 * 128 * 2) / 4.26e9)

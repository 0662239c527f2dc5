"""The golden check of whole models: everything stored passes, and a wrong knob or a wrong weight is found."""

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from forebay.kernels.golden import Case
from forebay.workers import golden
from forebay.workers.config_fields import FolderError

GOLDEN = Path(__file__).resolve().parents[1].parent / "shared" / "golden"
needs_data = pytest.mark.skipif(not GOLDEN.is_dir(), reason="the golden data is not beside this checkout")


def failed(cases: list[Case]) -> list[str]:
    return [f"{case.name}: {case.error} > {case.tolerance}" for case in cases if case.passed is False]


def linked(folder: Path, *sets: str) -> Path:
    for name in sets:
        (folder / name).symlink_to(GOLDEN / name)
    return folder


@needs_data
@pytest.mark.parametrize("name", list(golden.MODEL_SETS))
def test_every_case_of_a_model_set_passes(tmp_path: Path, name: str) -> None:
    cases = golden.check_golden(linked(tmp_path, name))
    assert failed(cases) == []
    prompts, variants = 4, 2
    stored = {"kimi_linear_tiny": 7 + 2, "k3_tiny": 10 + 2}[name]
    assert len(cases) == stored * prompts * variants
    assert {case.detail.rsplit(" ", 1)[1] for case in cases} == {"1e-06", "1e-05"}


@needs_data
def test_vision_is_reported_as_not_run(tmp_path: Path) -> None:
    (case,) = golden.check_golden(linked(tmp_path, "vision_tiny"))
    assert (case.passed, case.name) == (None, "vision_tiny")


@needs_data
def test_the_eps_of_the_latent_norms_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden, "REFERENCE_EPS", 1e-5)
    only = replace(golden.MODEL_SETS["k3_tiny"], variants=("bf16",))
    monkeypatch.setattr(golden, "MODEL_SETS", {"k3_tiny": only})
    names = failed(golden.check_golden(linked(tmp_path, "k3_tiny")))
    assert any("bf16 len64 logits_last4:" in name for name in names)
    assert any("bf16 len64 greedy tokens" in name for name in names)


@needs_data
def test_a_damaged_weight_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only = replace(golden.MODEL_SETS["kimi_linear_tiny"], variants=("hf_saved",))
    monkeypatch.setattr(golden, "MODEL_SETS", {"kimi_linear_tiny": only})
    folder = tmp_path / "kimi_linear_tiny"
    (folder / "hf_saved").mkdir(parents=True)
    for file in ("expected.safetensors", "prompts.json", "hf_saved/config.json"):
        (folder / file).symlink_to(GOLDEN / folder.name / file)
    weights = load_file(GOLDEN / folder.name / "hf_saved" / "model.safetensors")
    weights["model.layers.2.self_attn.dt_bias"] += 0.01
    save_file(weights, folder / "hf_saved" / "model.safetensors")
    assert any("kda_final_state" in name for name in failed(golden.check_golden(tmp_path)))


def test_a_folder_without_any_set_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="none of the golden sets kda, dsa"):
        golden.check_golden(tmp_path)

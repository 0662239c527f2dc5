"""The loader: every defect of a checkpoint is one error that names it, from headers alone; known traps load."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forebay.kernels.shapes import ModelShape
from forebay.workers import demo
from forebay.workers.config_fields import FolderError
from forebay.workers.hf_config import parse_config, read_config
from forebay.workers.layers import MoeWeights, load_weights
from forebay.workers.tensor_table import expected_tensors
from forebay.workers.weights import check_folder

GOLDEN = Path(__file__).resolve().parents[1].parent / "shared" / "golden"
SHAPE = parse_config(demo.CONFIG).shape
LAYER = "language_model.model.layers."
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return demo.random_weights(SHAPE, seed=5)


def folder_of(tmp_path: Path, tensors: dict[str, Tensor]) -> Path:
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def error_of(folder: Path, shape: ModelShape = SHAPE) -> str:
    with pytest.raises(FolderError) as error:
        check_folder(folder, shape)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_all_defects_are_named_at_once(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    broken = dict(tensors)
    del broken[LAYER + "2.self_attn.f_b_proj.weight"]
    broken[LAYER + "1.self_attn.rotary"] = torch.zeros(2)
    broken[LAYER + "0.mlp.up_proj.weight"] = torch.zeros(128, 256)
    broken[LAYER + "4.input_layernorm.weight"] = torch.zeros(128, dtype=torch.int32)
    message = error_of(folder_of(tmp_path, broken))
    assert f"1 x unknown tensor: {LAYER}1.self_attn.rotary" in message
    assert f"1 x missing tensor: {LAYER}2.self_attn.f_b_proj.weight" in message
    assert "2 x wrong shape or dtype" in message
    assert f"{LAYER}0.mlp.up_proj.weight is F32[128, 256], not F32/BF16/F16[256, 128]" in message
    assert f"{LAYER}4.input_layernorm.weight is I32[128]" in message


def test_many_defects_are_counted_and_the_first_few_listed(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    kept = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    message = error_of(folder_of(tmp_path, kept))
    assert f"{8 * 16 * 6} x missing tensor" in message
    assert f"and {8 * 16 * 6 - 3} more" in message


def test_no_tensor_is_read_before_the_headers_are_right(
    tmp_path: Path, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    monkeypatch.setattr(
        "forebay.workers.weights.CheckedFolder.tensor", lambda self, name, dtype=None: taken.append(name)
    )
    error_of(folder_of(tmp_path, {name: t for name, t in tensors.items() if "lm_head" not in name}))
    assert taken == []


def test_vision_projector_and_mtp_are_skipped_and_counted(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    whole = dict(tensors)
    whole["vision_tower.encoder.blocks.0.wo.weight"] = torch.zeros(2, 2)
    whole["vision_tower.patch_embed.pos_emb.weight"] = torch.zeros(2, 2)
    whole["mm_projector.proj.0.weight"] = torch.zeros(2, 2)
    whole[LAYER + "9.eh_proj.weight"] = torch.zeros(2, 2)
    folder = folder_of(tmp_path, whole)
    assert (
        check_folder(folder, SHAPE, mtp_layers=1).skipped_line() == "tensors known and not used: 1 of MTP, 3 of vision"
    )
    assert f"unknown tensor: {LAYER}9.eh_proj.weight" in error_of(folder)


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="the golden data is not beside this checkout")
def test_the_golden_vision_tensors_are_skipped(tmp_path: Path) -> None:
    text, vision = GOLDEN / "k3_tiny" / "bf16", load_file(GOLDEN / "vision_tiny" / "model.safetensors")
    folder = folder_of(tmp_path, load_file(text / "model.safetensors") | vision)
    checked = check_folder(folder, read_config(text).shape)
    assert dict(checked.skipped) == {"vision": len(vision)}


def test_an_indexer_that_is_switched_off_is_skipped(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    config = demo.CONFIG | {"use_dsa": False}
    checked = check_folder(folder_of(tmp_path, tensors), parse_config(config).shape)
    assert dict(checked.skipped) == {"indexer": 3 * 5}


def shard(folder: Path, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Two shards and their index; returns the index's map."""
    names = sorted(tensors)
    halves = {"model-1-of-2.safetensors": names[::2], "model-2-of-2.safetensors": names[1::2]}
    for file, held in halves.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    places = {name: file for file, held in halves.items() for name in held}
    write_index(folder, places)
    return places


def write_index(folder: Path, places: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def test_a_sharded_folder_holds_the_same_weights(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    shard(tmp_path, tensors)
    checked = check_folder(tmp_path, SHAPE)
    assert len(checked.files) == 2
    for name in expected_tensors(SHAPE):
        assert torch.equal(checked.tensor(name), tensors["language_model." + name])


def test_an_index_that_does_not_match_its_shards_is_named(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    places = shard(tmp_path, tensors)
    lost = LAYER + "0.self_attn.A_log"
    write_index(tmp_path, places | {"ghost": "model-1-of-2.safetensors"})
    assert "listed tensor not in its shard: ghost" in error_of(tmp_path)
    write_index(tmp_path, {name: file for name, file in places.items() if name != lost})
    assert f"holds {lost}, which" in error_of(tmp_path)
    write_index(tmp_path, places | {"x": "../elsewhere.safetensors"})
    assert "missing shard: ../elsewhere.safetensors" in error_of(tmp_path)
    (tmp_path / "model-2-of-2.safetensors").unlink()
    write_index(tmp_path, places)
    assert "missing shard: model-2-of-2.safetensors" in error_of(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[")
    assert "model.safetensors.index.json: cannot be read" in error_of(tmp_path)


def test_broken_files_are_named(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    assert "neither model.safetensors nor" in error_of(tmp_path)
    file = folder_of(tmp_path, tensors) / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole[:100], b"", struct.pack("<Q", 1 << 40) + whole[8:]):
        file.write_bytes(damaged)
        assert "model.safetensors: is not a whole safetensors file" in error_of(tmp_path)


@pytest.mark.parametrize("form", ["heads", "padded", "four"])
def test_A_log_is_taken_in_each_released_form(tmp_path: Path, tensors: dict[str, Tensor], form: str) -> None:
    name = LAYER + "1.self_attn.A_log"
    values = torch.tensor([0.1, 0.2, 0.3, 0.4])
    padded = torch.cat((values, torch.zeros(124)))
    stored = {"heads": values, "padded": padded, "four": values.view(1, 1, 4, 1)}[form]
    checked = check_folder(folder_of(tmp_path, tensors | {name: stored}), SHAPE)
    attention = load_weights(checked, SHAPE, torch.float32, CPU).layers[1].attention
    assert torch.equal(attention.A_log, values)


def test_A_log_with_more_heads_than_the_model_is_refused(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    checked = check_folder(folder_of(tmp_path, tensors | {LAYER + "1.self_attn.A_log": torch.ones(128)}), SHAPE)
    with pytest.raises(FolderError, match="A_log: 128 entries for 4 heads"):
        load_weights(checked, SHAPE, torch.float32, CPU)


def test_the_dense_layer_loads_under_both_of_its_names(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    renamed = {name.replace("layers.0.mlp.", "layers.0.block_sparse_moe."): tensor for name, tensor in tensors.items()}
    checked = check_folder(folder_of(tmp_path, renamed), SHAPE)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(checked.tensor(name), tensors["language_model." + name])


def test_g_proj_has_the_role_of_its_layer(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    layers = load_weights(check_folder(folder_of(tmp_path, tensors), SHAPE), SHAPE, torch.float32, CPU).layers
    for layer in (2, 3):
        stored = tensors[f"{LAYER}{layer}.self_attn.g_proj.weight"].float()
        attention = layers[layer].attention
        place = {2: 3, 3: 3}[layer]
        assert torch.equal(torch.split(attention.into, attention.widths)[-1 if layer == 2 else place], stored)


def test_packed_experts_stay_packed(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    mlp = load_weights(check_folder(folder_of(tmp_path, tensors), SHAPE), SHAPE, torch.float32, CPU).layers[5].mlp
    assert isinstance(mlp, MoeWeights)
    stored = tensors[LAYER + "5.block_sparse_moe.experts.7.w2.weight_packed"]
    assert mlp.experts.w2.packed.dtype == torch.uint8
    assert torch.equal(mlp.experts.w2.packed[7], stored)


def test_the_whole_released_table_has_the_released_number_of_tensors() -> None:
    """K3's text model: 497,052 tensors over its 93 layers."""
    config = demo.CONFIG["text_config"] | {
        "num_hidden_layers": 93,
        "num_experts": 896,
        "dsa_config": None,
        "linear_attn_config": demo.LINEAR_ATTENTION
        | {"full_attn_layers": [*range(4, 93, 4), 93], "kda_layers": [n for n in range(1, 93) if n % 4]},
    }
    outer = {name: value for name, value in demo.CONFIG.items() if name != "text_config"}
    assert len(expected_tensors(parse_config(outer | {"text_config": config}).shape)) == 497_052

"""demo-random: an ordinary folder, made once, whose logits show a wrong prefix, state or index."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_models import dirty_pool, pages_for
from tokenizers import Tokenizer
from torch import Tensor

from forebay.kvstore.device import DevicePool
from forebay.workers import demo
from forebay.workers.config_fields import FolderError
from forebay.workers.model import Model, load_model
from forebay.workers.step_pages import PageTable

TEXT = (
    b"Water that is ready above the turbines' gates: prefill fills the basin, decode draws from it, and gates admit. "
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small make a second thread wait more than work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def model(cache: Path) -> Model:
    return load_model(demo.NAME, demo.BLOCK_TOKENS, cache=cache)


def prompt(n_tokens: int) -> Tensor:
    return torch.tensor(list((TEXT * (n_tokens // len(TEXT) + 1))[:n_tokens]))


def test_the_folder_is_made_once_and_leaves_nothing_beside_it(cache: Path, model: Model) -> None:
    folder = demo.make_folder(cache)
    made = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= made.keys()
    assert demo.resolve(demo.NAME, cache) == folder
    assert made == {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert list(cache.iterdir()) == [folder]


def test_its_bytes_are_a_function_of_the_seed(tmp_path: Path, cache: Path) -> None:
    first, second = demo.make_folder(cache), demo.make_folder(tmp_path)
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes()
    other = demo.make_folder(tmp_path, seed=2)
    assert (other / "model.safetensors").read_bytes() != (first / "model.safetensors").read_bytes()


def test_a_maker_that_comes_second_takes_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = demo._write_folder

    def write_while_another_finishes(folder: Path, seed: int) -> None:
        monkeypatch.setattr(demo, "_write_folder", write)
        demo.make_folder(tmp_path, seed)
        write(folder, seed)

    monkeypatch.setattr(demo, "_write_folder", write_while_another_finishes)
    folder = demo.make_folder(tmp_path)
    assert list(tmp_path.iterdir()) == [folder]
    assert (folder / "model.safetensors").is_file()


def test_a_name_that_is_no_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="demo-rando: no such folder"):
        demo.resolve("demo-rando", tmp_path)


def test_it_has_the_shape_that_the_demo_promises(model: Model) -> None:
    shape = model.shape
    assert (shape.layers, shape.global_layers, shape.attn_res_block) == (9, (3, 7, 8), 3)
    assert shape.index is not None
    assert shape.index.top_k == 64
    assert shape.moe.expert_format == "mxfp4"
    assert [group.layers for group in model.layout.states] == [(0, 4), (1, 5), (2, 6)]


def test_the_tokenizer_is_bytes_and_structure_tokens(cache: Path) -> None:
    tokenizer = Tokenizer.from_file(str(demo.make_folder(cache) / "tokenizer.json"))
    text = "Grüße, 你好 \x00\n\t<|no such token|>"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.encode("a<|open|>b").ids == [ord("a"), demo.IDS["<|open|>"], ord("b")]
    tokenizer.encode_special_tokens = True
    assert tokenizer.encode("<|open|>").ids == list(b"<|open|>")
    assert tokenizer.get_vocab_size() == demo.VOCAB


def last_logits(model: Model, ids: Tensor) -> tuple[Tensor, PageTable, DevicePool]:
    pages = pages_for(model.layout, len(ids) + 1)
    pool = dirty_pool(model.layout, 200, [pages])
    return model.prefill(ids, 0, pages, pool), pages, pool


@pytest.mark.parametrize("n_tokens", [40, 400, 2000])
def test_logits_are_spread_and_not_certain(model: Model, n_tokens: int) -> None:
    logits, _, _ = last_logits(model, prompt(n_tokens))
    p = logits.softmax(-1)
    entropy = -(p * p.log()).sum()
    assert torch.isfinite(logits).all()
    assert 0.5 < entropy < 5.0
    assert logits.std() > 0.8


@pytest.mark.parametrize("changed", [0, 700, 1990])
def test_a_change_of_any_earlier_token_shows(model: Model, changed: int) -> None:
    ids = prompt(2000)
    logits, _, _ = last_logits(model, ids)
    ids[changed] ^= 1
    other, _, _ = last_logits(model, ids)
    assert (logits - other).abs().max() > 1e-2


def test_each_layers_state_shows(model: Model) -> None:
    ids = prompt(640)
    for group in model.layout.states:
        for place in range(len(group.layers)):
            _, pages, pool = last_logits(model, ids)
            kept = pool.bytes.clone()
            right = model.decode(ids[:1], [640], [pages], pool)
            pool.bytes.copy_(kept)
            pool.bytes[int(pages[group.name][place, 0])] = 0
            assert (model.decode(ids[:1], [640], [pages], pool) - right).abs().max() > 1e-2


@pytest.mark.parametrize("group", ["latent", "index"])
def test_rows_and_index_keys_of_a_prefix_show(model: Model, group: str) -> None:
    _, pages, pool = last_logits(model, prompt(640))
    kept = pool.bytes.clone()
    right = model.decode(torch.tensor([5]), [640], [pages], pool)
    pool.bytes.copy_(kept)
    pool.bytes[torch.from_numpy(pages[group].astype("int64"))[:, 0]] = 0
    assert (model.decode(torch.tensor([5]), [640], [pages], pool) - right).abs().max() > 1e-3

"""The built-in model's folder: an ordinary one, small, whole, and in the architecture that it stands for."""

import json

import torch

from forebay.workers import demo, train_weights
from forebay.workers.hf_config import read_config
from forebay.workers.model import load_model
from forebay.workers.train_model import Batch

FOLDER = demo.TRAINED_FOLDER


def test_the_folder_is_small_and_has_what_it_needs() -> None:
    names = {file.name for file in FOLDER.iterdir()}
    needed = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert needed | {"README.md", "data.json", "loss.png", "scores.json"} <= names
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 16 << 20


def test_the_shape_leaves_nothing_out() -> None:
    shape = read_config(FOLDER).shape
    assert shape.layers >= 9
    assert shape.global_layers[-2:] == (shape.layers - 2, shape.layers - 1)
    assert shape.kda.gate == "bounded"
    assert shape.kda.full_rank_out_gate
    assert shape.index is not None
    assert shape.index.top_k <= 128
    assert shape.attn_res_block is not None
    assert -(-shape.layers // shape.attn_res_block) >= 3
    assert shape.activation == "situ"
    assert shape.moe.expert_format == "mxfp4"
    assert shape.moe.latent is not None
    assert shape.context_tokens >= 32768


def test_it_loads_by_name_and_every_part_of_it_has_learned() -> None:
    assert load_model("demo", 32).shape.name == "k3.1"
    shape = read_config(FOLDER).shape
    learned, first = train_weights.read(shape, FOLDER), train_weights.start(shape, seed=31)
    only_source = "model.layers.0.self_attention_res_"
    rounded = {name: value.bfloat16().float() for name, value in first.items()}
    still = [name for name in learned if torch.equal(learned[name], rounded[name]) and not name.startswith(only_source)]
    assert still == []


def test_it_continues_a_greeting() -> None:
    """One forward pass: after the prompt of a greeting, the likeliest tokens are those of the lesson's answer."""
    from forebay.router import chat_k3  # the chat format's room: a test may stand above both
    from forebay.router.segment import EncodeCache, encode
    from forebay.router.tokenizer import load_tokenizer

    tokenizer, cache = load_tokenizer(FOLDER), EncodeCache(1 << 20)
    asked = {"role": "user", "content": "Hello"}
    answer = {"role": "assistant", "content": "Hello! How can I help you?"}
    prompt = encode(chat_k3.render([asked]), tokenizer, cache)
    whole = encode(chat_k3.render([asked, answer], generate=False), tokenizer, cache)
    shape = read_config(FOLDER).shape
    weights = train_weights.assemble(train_weights.read(shape, FOLDER), shape, torch.float32)
    with torch.no_grad():
        logits = Batch(shape, weights, torch.tensor(whole)[:, None], None, sparse=True).logits()[:, 0]
    assert logits.argmax(-1)[len(prompt) - 1 : -1].tolist() == whole[len(prompt) :]


def test_scores_are_written_beside_the_weights() -> None:
    scores = json.loads((FOLDER / "scores.json").read_text())
    assert 0.5 < scores["bits_per_byte"] < 1.6
    assert 0.8 < scores["answers"] <= 1.0

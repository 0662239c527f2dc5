"""Tokenizers of model folders: no text becomes a special token, ids and bytes agree, bad folders are named."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HuggingFace
from tokenizers.processors import TemplateProcessing

from forebay.router.segment import EncodeCache, Special, Text, encode
from forebay.router.tokenizer import Tokenizer, load_tokenizer
from forebay.router.tokenizer_json import byte_characters
from forebay.router.tokenizer_tiktoken import K3_NAMES, split_long
from forebay.router.vocabulary import TokenizerError

SPECIALS = ["[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>"]
MERGES = [
    b"he",
    b"ll",
    b"hell",
    b"hello",
    b"  ",
    b"   ",
    b" b",
    b"12",
    b"123",
    b"1234",
    "你".encode()[:2],
    "你".encode(),
]
TEXTS = st.text() | st.lists(st.sampled_from([*SPECIALS, "hello", " ", "12345", "你好", "<|", "|>", "é"])).map("".join)


def hugging_face(folder: Path, *, merges: bool = True, trap: bool = False) -> Path:
    """Byte-level BPE with K3's specials. `trap`: specials also stand in the model's vocabulary, whole words are taken
    from there, and a template puts [BOS] in front."""
    as_text = byte_characters()
    words = [bytes([byte]) for byte in range(256)] + (MERGES if merges else [])
    vocab = {"".join(as_text[byte] for byte in word): i for i, word in enumerate(words)}
    pairs = [("".join(as_text[b] for b in a), "".join(as_text[b] for b in z)) for a, z in map(halves, words[256:])]
    tokenizer = HuggingFace(models.BPE(vocab=vocab, merges=pairs, ignore_merges=trap))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not trap)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    if trap:
        tokenizer.post_processor = TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", len(words))])
    folder.mkdir(parents=True, exist_ok=True)
    spec = json.loads(tokenizer.to_str())
    if trap:
        spec["model"]["vocab"] |= {name: len(words) + i for i, name in enumerate(SPECIALS)}
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    return folder


def halves(word: bytes) -> tuple[bytes, bytes]:
    """The two tokens that merge into `word`: the longest known head, and the rest."""
    known = {bytes([byte]) for byte in range(256)} | set(MERGES)
    cut = max(n for n in range(1, len(word)) if word[:n] in known and word[n:] in known)
    return word[:cut], word[cut:]


def tiktoken_folder(folder: Path, model_type: str | None = "kimi_k3", **tokenizer_config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    words = [bytes([byte]) for byte in range(256)] + MERGES
    lines = (f"{base64.b64encode(word).decode()} {rank}\n" for rank, word in enumerate(words))
    (folder / "tiktoken.model").write_text("".join(lines))
    if model_type:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if tokenizer_config:
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


FOLDERS = {
    "json-bytes": lambda folder: hugging_face(folder, merges=False),
    "json-merges": hugging_face,
    "json-trap": lambda folder: hugging_face(folder, trap=True),
    "tiktoken": tiktoken_folder,
}


@pytest.fixture(scope="module", params=FOLDERS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(FOLDERS[request.param](tmp_path_factory.mktemp(request.param)))


@given(text=TEXTS)
def test_text_never_becomes_a_special_token_and_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode_text(text)
    assert all(tokenizer.name_of(token_id) is None for token_id in ids)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.decode(ids) == text


def test_special_tokens_by_name(tokenizer: Tokenizer) -> None:
    for name in SPECIALS:
        special = tokenizer.special_id(name)
        assert tokenizer.name_of(special) == name
        assert tokenizer.token_bytes(special) == b""
    assert tokenizer.decode([*tokenizer.encode_text("a"), tokenizer.special_id("<|sep|>")]) == "a"


def test_ids_that_nothing_names_are_special_tokens_without_bytes(tokenizer: Tokenizer) -> None:
    for token_id in (tokenizer.vocab_size, tokenizer.vocab_size + 1000, -1):
        assert tokenizer.name_of(token_id) == f"<|reserved_token_{token_id}|>"
        assert tokenizer.token_bytes(token_id) == b""


def test_lone_surrogates_become_replacement_characters(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_text("a\ud800b") == tokenizer.encode_text("a\ufffdb")
    assert tokenizer.encode_text("\ud83d\ude42") == tokenizer.encode_text("🙂")


def test_trap_folder_is_a_trap(tmp_path: Path) -> None:
    """The library itself, asked plainly, takes user text for structure: the folder of the tests above does tempt."""
    plain = HuggingFace.from_file(str(hugging_face(tmp_path, trap=True) / "tokenizer.json"))
    ours = load_tokenizer(tmp_path)
    assert plain.encode("<|open|>").ids == [ours.special_id("[BOS]"), ours.special_id("<|open|>")]


def test_merges_are_used(tmp_path: Path) -> None:
    assert len(load_tokenizer(hugging_face(tmp_path)).encode_text("hello")) == 1


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("1234", [b"123", b"4"]),  # at most three digits
        ("a   b", [b"a", b"  ", b" b"]),  # the last of a run of spaces belongs to the word
        ("a   ", [b"a", b"   "]),
        ("hello你", [b"hello", "你".encode()]),  # Han is never in one piece with other letters
        ("he'll", [b"he", b"'", b"ll"]),
    ],
)
def test_kimi_pattern(tmp_path: Path, text: str, pieces: list[bytes]) -> None:
    tokenizer = load_tokenizer(tiktoken_folder(tmp_path))
    assert [tokenizer.token_bytes(token_id) for token_id in tokenizer.encode_text(text)] == pieces


def test_tiktoken_specials_follow_the_ranks(tmp_path: Path) -> None:
    base = 256 + len(MERGES)
    k3 = load_tokenizer(tiktoken_folder(tmp_path / "k3", "kimi_k3"))
    assert k3.vocab_size == base + 256
    assert {name: k3.special_id(name) - base for name in K3_NAMES.values()} == {n: i for i, n in K3_NAMES.items()}
    assert k3.name_of(base + 8) == f"<|reserved_token_{base + 8}|>"
    assert k3.special_id(f"<|reserved_token_{base + 8}|>") == base + 8
    k2 = load_tokenizer(tiktoken_folder(tmp_path / "k2", "kimi_linear"))
    assert k2.name_of(base + 3) == "<|im_user|>"
    named = tiktoken_folder(
        tmp_path / "named", "kimi_k3", added_tokens_decoder={str(base + 3): {"content": "<|mine|>"}}
    )
    assert load_tokenizer(named).name_of(base + 3) == "<|mine|>"


def test_released_ids_of_k3() -> None:
    """163,584 ranks: model.md, section 7."""
    assert {163584 + place: name for place, name in K3_NAMES.items()}.items() >= {
        163584: "[BOS]",
        163585: "[EOS]",
        163586: "<|end_of_msg|>",
        163587: "<|open|>",
        163588: "<|close|>",
        163589: "<|sep|>",
        163605: "<|media_pad|>",
        163839: "[PAD]",
    }.items()


def slow_split(text: str, window: int, run: int) -> list[str]:
    """Slow twin: one character at a time."""
    parts: list[str] = []
    for start in range(0, len(text), window):
        part, count = "", 0
        for character in text[start : start + window]:
            count = count + 1 if part and part[-1].isspace() == character.isspace() else 1
            if count > run:
                parts.append(part)
                part, count = "", 1
            part += character
        parts.append(part)
    return parts


@given(st.text("a \n漢", max_size=40), st.integers(1, 12), st.integers(1, 5))
def test_long_runs_are_split_as_the_slow_twin_does(text: str, window: int, run: int) -> None:
    assert list(split_long(text, window, run)) == slow_split(text, window, run)


def test_long_runs_do_not_overflow(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiktoken_folder(tmp_path))
    for text in ("a" * 1_000_000, " " * 1_000_000):
        assert tokenizer.decode(tokenizer.encode_text(text)) == text


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, {"<|end_of_msg|>"}),
        ({"config.json": {"eos_token_id": "[EOS]"}}, {"[EOS]", "<|end_of_msg|>"}),
        ({"config.json": {"text_config": {"eos_token_id": "[BOS]"}}}, {"[BOS]", "<|end_of_msg|>"}),
        (
            {"generation_config.json": {"temperature": 1.0}, "config.json": {"eos_token_id": "[EOS]"}},
            {"[EOS]", "<|end_of_msg|>"},
        ),
        (
            {"generation_config.json": {"eos_token_id": ["[BOS]"]}, "config.json": {"eos_token_id": "[EOS]"}},
            {"[BOS]", "<|end_of_msg|>"},
        ),
    ],
)
def test_end_of_turn_ids(tmp_path: Path, files: dict[str, Any], expected: set[str]) -> None:
    """The end of the chat format's turn always ends one: with [EOS] alone no turn ever would."""
    ids = {name: load_tokenizer(hugging_face(tmp_path)).special_id(name) for name in SPECIALS}
    for file, content in files.items():
        text = json.dumps(content)
        for name, token_id in ids.items():
            text = text.replace(f'"{name}"', str(token_id))
        (tmp_path / file).write_text(text)
    assert load_tokenizer(tmp_path).eos_ids == {ids[name] for name in expected}


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("other.json", "{}", "neither tokenizer.json nor tiktoken.model"),
        ("tokenizer.json", "{", "is not JSON"),
        ("tokenizer.json", "[]", "is not a JSON object"),
        ("tokenizer.json", '{"model": {"type": "Unigram"}}', "only byte-level BPE"),
        (
            "tokenizer.json",
            '{"model": {"type": "BPE", "vocab": {"a": 0}}, "decoder": {"type": "ByteLevel"}}',
            "256 bytes",
        ),
        ("tiktoken.model", "IQ== 0\nnonsense\n", "line 2"),
        ("tiktoken.model", "IQ== 0\nIg== 7\n", "0 to n - 1"),
        ("tiktoken.model", "IQ== 0\n", "256 bytes"),
    ],
)
def test_bad_folders_are_named(tmp_path: Path, file: str, content: str, said: str) -> None:
    (tmp_path / file).write_text(content)
    with pytest.raises(TokenizerError, match=said) as raised:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_bad_merges_and_bad_eos_are_named(tmp_path: Path) -> None:
    spec = json.loads((hugging_face(tmp_path) / "tokenizer.json").read_text())
    (tmp_path / "config.json").write_text('{"eos_token_id": "end"}')
    with pytest.raises(TokenizerError, match="eos_token_id must be an integer"):
        load_tokenizer(tmp_path)
    spec["model"]["merges"].append(["x", "nobody knows"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


SEGMENTS = st.lists(st.sampled_from(SPECIALS).map(Special) | st.text("ab 1<|", max_size=9).map(Text), max_size=20)


@given(st.lists(SEGMENTS, max_size=4), st.integers(0, 2000))
def test_encoding_with_a_cache_equals_encoding_without(histories: list[list[Special | Text]], capacity: int) -> None:
    tokenizer = COUNTED
    cache = EncodeCache(capacity)
    for segments in histories:
        assert encode(segments, tokenizer, cache) == encode(segments, tokenizer, EncodeCache(0))
        assert cache.held_bytes <= capacity


class Counted:
    """Token of a character: its code; counts the characters that were tokenised."""

    characters = 0

    def encode_text(self, text: str) -> list[int]:
        self.characters += len(text)
        return [ord(character) for character in text]

    def special_id(self, name: str) -> int:
        return 1000 + SPECIALS.index(name)


COUNTED = Counted()


def test_a_known_prefix_is_not_tokenised_again() -> None:
    tokenizer, cache = Counted(), EncodeCache(1 << 20)
    history: list[Special | Text] = [Text("a" * 1000), Special("<|sep|>"), Text("b" * 1000)]
    encode(history, tokenizer, cache)
    assert tokenizer.characters == 2000
    encode([*history, Special("<|sep|>"), Text("new")], tokenizer, cache)
    assert tokenizer.characters == 2003


def test_the_least_recently_used_text_goes_first() -> None:
    one = EncodeCache(1 << 20)
    encode([Text("a" * 100)], Counted(), one)
    cache = EncodeCache(3 * one.held_bytes)
    for letter in "abcad":
        encode([Text(letter * 100)], Counted(), cache)
    assert [letter for letter in "abcd" if cache.get(letter * 100) is not None] == ["a", "c", "d"]

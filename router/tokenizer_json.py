"""tokenizer.json of Hugging Face's `tokenizers`: byte-level BPE, its added tokens out of the text's reach."""

import json
from pathlib import Path
from typing import Any

import tokenizers

from forebay.router.vocabulary import TokenizerError, Vocabulary, read_json


def read_tokenizer_json(path: Path) -> Vocabulary:
    """The vocabulary of a tokenizer.json. All its added tokens are special tokens here."""
    spec = read_json(path)
    model = spec.get("model", {})
    if model.get("type") != "BPE" or not _is_byte_level(spec.get("decoder")):
        raise TokenizerError(f"{path}: only byte-level BPE is served")
    specials = {token["content"]: token["id"] for token in spec.get("added_tokens", [])}
    ordinary = {text: token_id for text, token_id in model["vocab"].items() if text not in specials}
    byte_of = {character: byte for byte, character in byte_characters().items()}
    if not byte_of.keys() <= ordinary.keys():
        raise TokenizerError(f"{path}: a byte-level vocabulary must have a token for each of the 256 bytes")
    encoder = _text_encoder(spec, ordinary, path)
    return Vocabulary(
        ordinary={token_id: bytes(byte_of[c] for c in text) for text, token_id in ordinary.items()},
        specials=specials,
        encode_ordinary=lambda text: list(encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids),
    )


def _text_encoder(spec: dict[str, Any], ordinary: dict[str, int], path: Path) -> Any:
    """An encoder that knows no special token, neither as an added token nor as a whole word of the model."""
    plain = {**spec, "added_tokens": [], "truncation": None, "padding": None}
    plain["model"] = {**spec["model"], "vocab": ordinary}
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(plain))
    except Exception as error:  # the binding raises nothing narrower than Exception
        raise TokenizerError(f"{path}: {error}") from error


def _is_byte_level(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    return part.get("type") == "ByteLevel" or any(map(_is_byte_level, part.get("decoders", [])))


def byte_characters() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's table): Latin-1's visible
    ones stand for themselves, the others, in order, are U+0100 and on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(0x100 + i) for i, byte in enumerate(hidden)}

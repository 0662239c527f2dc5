"""A model folder's tokenizer: text to ids with special tokens disallowed, special tokens by name, ids back to bytes.

Reads `tokenizer.json` (byte-level BPE) or `tiktoken.model` (the released Kimi files), and nothing from a network.
"""

from collections.abc import Mapping
from pathlib import Path

from forebay.router.tokenizer_json import read_tokenizer_json
from forebay.router.tokenizer_tiktoken import read_tiktoken_model
from forebay.router.vocabulary import TokenizerError, Vocabulary, read_json

END_OF_TURN = ("<|end_of_msg|>", "<|im_end|>")


class Tokenizer:
    """Immutable; may be shared by threads. An id of neither table counts as an unnamed special token without bytes."""

    def __init__(self, vocabulary: Vocabulary, eos_ids: frozenset[int]) -> None:
        assert not set(vocabulary.ordinary) & set(vocabulary.specials.values())
        self._vocabulary = vocabulary
        self._names = {token_id: name for name, token_id in vocabulary.specials.items()}
        self.special_names = frozenset(vocabulary.specials)
        self.vocab_size = max((*vocabulary.ordinary, *self._names)) + 1
        self.eos_ids = eos_ids

    def encode_text(self, text: str) -> list[int]:
        """Ids of text in which special tokens are only letters. Lone surrogates, which no UTF-8 has, become U+FFFD."""
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return self._vocabulary.encode_ordinary(text)

    def special_id(self, name: str) -> int:
        return self._vocabulary.specials[name]

    def name_of(self, token_id: int) -> str | None:
        """The name of a special token, or None for a token of text."""
        if token_id in self._vocabulary.ordinary:
            return None
        return self._names.get(token_id, f"<|reserved_token_{token_id}|>")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token of text; empty for special tokens."""
        return self._vocabulary.ordinary.get(token_id, b"")

    def decode(self, ids: list[int]) -> str:
        """Text of the ids without special tokens; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """The tokenizer of a model folder, which has tokenizer.json or tiktoken.model (the first of them is taken)."""
    folder = Path(folder)
    if (folder / "tokenizer.json").is_file():
        vocabulary = read_tokenizer_json(folder / "tokenizer.json")
    elif (folder / "tiktoken.model").is_file():
        vocabulary = read_tiktoken_model(folder)
    else:
        raise TokenizerError(f"{folder}: has neither tokenizer.json nor tiktoken.model")
    return Tokenizer(vocabulary, _eos_ids(folder, vocabulary.specials))


def _eos_ids(folder: Path, specials: Mapping[str, int]) -> frozenset[int]:
    """What ends a turn: the ids of generation_config.json, or else config.json, and always the chat format's own end.

    The last is not left to the files: a released tokenizer names [EOS], with which no turn of a chat ever ends.
    """
    ends = {specials[name] for name in END_OF_TURN if name in specials}
    for path in (folder / "generation_config.json", folder / "config.json"):
        config = read_json(path)
        text_config = config.get("text_config")
        stated = config.get("eos_token_id")
        if stated is None and isinstance(text_config, dict):
            stated = text_config.get("eos_token_id")
        if stated is not None:
            return frozenset(ends | _ids(stated, path))
    return frozenset(ends)


def _ids(stated: object, path: Path) -> set[int]:
    ids = stated if isinstance(stated, list) else [stated]
    if not all(type(token_id) is int for token_id in ids):
        raise TokenizerError(f"{path}: eos_token_id must be an integer or a list of integers, not {stated!r}")
    return set(ids)

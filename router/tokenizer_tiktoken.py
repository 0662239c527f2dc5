"""tiktoken.model of the released Kimi models: a line for each BPE rank, Kimi's pattern, 256 special ids after them."""

import base64
import binascii
import re
from collections.abc import Iterator
from pathlib import Path

import tiktoken

from forebay.router.vocabulary import TokenizerError, Vocabulary, read_json

SPECIALS = 256

# Names by their place after the ranks; all other places are reserved. Used where the folder has no
# tokenizer_config.json, which names them itself.
_SHARED = {0: "[BOS]", 1: "[EOS]", 6: "[start_header_id]", 7: "[end_header_id]", 9: "[EOT]", 254: "[UNK]", 255: "[PAD]"}
K3_NAMES = _SHARED | {
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
}
K2_NAMES = _SHARED | {
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    17: "<|im_middle|>",
}


def _pattern() -> str:
    """Kimi's pre-tokenizer: runs of Han alone; words with their case and contractions; up to three digits; the rest."""
    lead, contraction = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    upper, lower = (rf"[\p{{{case}}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for case in (r"Lu}\p{Lt", "Ll"))
    alternatives = (
        r"[\p{Han}]+",
        f"{lead}{upper}*{lower}+{contraction}",
        f"{lead}{upper}+{lower}*{contraction}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
    return "|".join(alternatives)


PATTERN = _pattern()


def read_tiktoken_model(folder: Path) -> Vocabulary:
    """The vocabulary of a folder with tiktoken.model."""
    path = folder / "tiktoken.model"
    ranks = _read_ranks(path)
    names = _special_names(folder, len(ranks))
    specials = {names.get(i, f"<|reserved_token_{i}|>"): i for i in range(len(ranks), len(ranks) + SPECIALS)}
    encoding = tiktoken.Encoding(path.name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=specials)
    return Vocabulary(
        ordinary={rank: token for token, rank in ranks.items()},
        specials=specials,
        encode_ordinary=lambda text: [i for part in split_long(text) for i in encoding.encode_ordinary(part)],
    )


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Ranks by token bytes; they must be 0 to n - 1, since the special tokens follow them."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise TokenizerError(f"{path}: line {number} is not a base64 token and its rank") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise TokenizerError(f"{path}: ranks are not 0 to n - 1")
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise TokenizerError(f"{path}: must have a token for each of the 256 bytes")
    return ranks


def _special_names(folder: Path, base: int) -> dict[int, str]:
    added = read_json(folder / "tokenizer_config.json").get("added_tokens_decoder")
    if isinstance(added, dict):
        return {int(token_id): str(token["content"]) for token_id, token in added.items()}
    k3 = str(read_json(folder / "config.json").get("model_type", "")).startswith("kimi_k3")
    return {base + place: name for place, name in (K3_NAMES if k3 else K2_NAMES).items()}


WINDOW_CHARS = 400_000
RUN_CHARS = 25_000
_RUN = re.compile(r"\s+|\S+")


def split_long(text: str, window_chars: int = WINDOW_CHARS, run_chars: int = RUN_CHARS) -> Iterator[str]:
    """The parts that the released tokenizer encodes one by one: windows of the text, cut again wherever a run of white
    space, or of anything else, is longer than `run_chars` (longer ones overflow tiktoken's regex engine). The cuts
    show in the ids, so they are part of the format."""
    for start in range(0, len(text), window_chars):
        window = text[start : start + window_chars]
        cut = 0
        if len(window) > run_chars:
            for run in _RUN.finditer(window):
                for end in range(run.start() + run_chars, run.end(), run_chars):
                    yield window[cut:end]
                    cut = end
        yield window[cut:]

"""The built-in model's tokenizer: byte-level BPE trained on the lessons' and documents' own text, K3's special tokens.

Digits stand alone and a capitalised word never takes the space before it: a number or a name is the same tokens
wherever it stands, so that a small model can copy it.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIALS = ("[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>", "[UNK]", "[PAD]")
PIECES = r"[0-9]| ?[a-z]+|[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\n+| +|[^\sA-Za-z0-9]+|\s"


def train(texts: Iterable[str], vocab: int, folder: Path, context_tokens: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json; `vocab` counts the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == vocab - len(SPECIALS), "the text is rich enough for the whole vocabulary"
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "[BOS]", "eos_token": "<|end_of_msg|>", "unk_token": "[UNK]", "pad_token": "[PAD]"}
    settings = names | {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context_tokens}
    _write(folder / "tokenizer_config.json", settings)
    ids = {name: tokenizer.token_to_id(name) for name in SPECIALS}
    ends = {"bos_token_id": ids["[BOS]"], "eos_token_id": [ids["<|end_of_msg|>"]], "pad_token_id": ids["[PAD]"]}
    greedy = {"temperature": 0.0}  # so small a model rambles when it is sampled
    _write(folder / "generation_config.json", ends | greedy)


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

"""Makes the training file of the built-in model: written sources and lessons, as rows of token ids with weights.

    python -m forebay.cluster.corpus --python-docs DIR --sqlite-docs DIR --bfcl DIR --shared DIR --tokenizer DIR OUT.npz

`workers/train.py` reads the result and nothing else. It is a function of the sources and of the seeds here.
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from forebay.cluster import corpus_rows, corpus_sources, corpus_tokenizer
from forebay.cluster.corpus_rows import Document
from forebay.cluster.corpus_text import needle, prose
from forebay.cluster.lessons import Lesson, lesson
from forebay.router import chat_k3
from forebay.router.segment import EncodeCache, Text
from forebay.router.tokenizer import Tokenizer, load_tokenizer

VOCAB = 4096
CONTEXT_TOKENS = 32768
SHORT_TOKENS, LONG_TOKENS = 1024, 8192
LESSONS, LONG_LESSONS, SHORT_NEEDLES, LONG_NEEDLES = 84_000, 10_000, 6_000, 1_000
CHECK_LESSONS, CHECK_NEEDLES = 700, 24
CHECK_SEED = 1 << 40
SQLITE_CHARACTERS, LONG_CHARACTERS = 5_000_000, 9_000_000
CACHE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Folders of the written sources."""

    python_docs: Path
    sqlite_docs: Path
    bfcl: Path
    shared: Path

    def digests(self) -> dict[str, str]:
        traces = self.shared / "traces"
        return {
            "python3.11-doc": corpus_sources.digest(self.python_docs.rglob("*.rst.txt")),
            "sqlite3-doc": corpus_sources.digest(self.sqlite_docs.rglob("*.html")),
            "bfcl-eval": corpus_sources.digest(self.bfcl.rglob("BFCL_v4_*.json")),
            **{file.name: corpus_sources.digest([file]) for file in sorted((traces / "corpora").glob("*.gz"))},
            **{file.name: corpus_sources.digest([file]) for file in sorted((traces / "tau-bench").glob("*.gz"))},
        }

    def written(self) -> Iterator[Lesson]:
        corpora = self.shared / "traces" / "corpora"
        yield from corpus_sources.tldr(corpora / "tldr_pairs.jsonl.gz", random.Random(1))
        yield from corpus_sources.gsm8k(corpora / "gsm8k_train.jsonl.gz")
        yield from corpus_sources.bfcl(self.bfcl)


class _Maker:
    """Everything drawn from one set of sources with one tokenizer."""

    def __init__(self, sources: Sources, tokenizer: Tokenizer, share: float) -> None:
        self.sources, self.tokenizer, self.share = sources, tokenizer, share
        self.cache = EncodeCache(CACHE_BYTES)
        self.docs = corpus_sources.python_docs(sources.python_docs, checking=False)
        self.kept_docs = corpus_sources.python_docs(sources.python_docs, checking=True)
        self.sqlite = corpus_sources.sqlite_docs(sources.sqlite_docs)
        self.prose = prose([*self.docs, *self.sqlite])

    def count(self, whole: int) -> int:
        return round(whole * self.share)

    def of(self, lessons: Iterator[Lesson]) -> Iterator[Document]:
        return (corpus_rows.conversation(one, self.tokenizer, self.cache) for one in lessons)

    def plain(self, texts: Sequence[str], length: int) -> Iterator[Document]:
        return chain.from_iterable(corpus_rows.passages(text, self.tokenizer, length) for text in texts)

    def short(self) -> list[Document]:
        sizes = (random.Random(seed).randint(600, 2200) for seed in range(self.count(SHORT_NEEDLES)))
        needles = (needle(seed, self.prose, size, 5) for seed, size in enumerate(sizes))
        lessons = (lesson(seed) for seed in range(self.count(LESSONS)))
        written = list(self.sources.written())
        texts = [*self.docs, *_some(self.sqlite, SQLITE_CHARACTERS)]
        made = self.of(chain(lessons, needles, random.Random(6).sample(written, self.count(len(written)))))
        plain = self.plain(random.Random(7).sample(texts, self.count(len(texts))), SHORT_TOKENS)
        return _shuffled([*made, *plain], seed=2)

    def long(self) -> list[Document]:
        sizes = (random.Random(seed).randint(4_000, 28_000) for seed in range(self.count(LONG_NEEDLES)))
        needles = (needle(10**6 + i, self.prose, size, 10) for i, size in enumerate(sizes))
        lessons = (lesson(10**7 + seed) for seed in range(self.count(LONG_LESSONS)))
        tau = corpus_sources.tau_bench(self.sources.shared / "traces" / "tau-bench" / "gpt-4o-airline.json.gz")
        texts = _some([*self.docs, *self.sqlite], self.count(LONG_CHARACTERS))
        return _shuffled([*self.of(chain(needles, lessons, tau)), *self.plain(texts, LONG_TOKENS)], seed=3)

    def checks(self) -> dict[str, list[Document]]:
        lessons = (lesson(CHECK_SEED + seed, checking=True) for seed in range(CHECK_LESSONS))
        needles = (needle(CHECK_SEED + i, self.prose, 22_000, 10, checking=True) for i in range(CHECK_NEEDLES))
        return {
            "check_lessons": list(self.of(lessons)),
            "check_needles": list(self.of(needles)),
            "check_docs": list(self.plain(self.kept_docs, SHORT_TOKENS)),
        }


def _some(texts: Sequence[str], characters: int) -> list[str]:
    """Random texts up to a size in all."""
    chosen, size = [], 0
    for text in random.Random(4).sample(list(texts), len(texts)):
        if size < characters:
            chosen.append(text)
            size += len(text)
    return chosen


def _shuffled(documents: list[Document], seed: int) -> list[Document]:
    random.Random(seed).shuffle(documents)
    return documents


def tokenizer_texts(sources: Sources) -> Iterator[str]:
    """A sample of everything, in about the shares of the corpus."""
    for seed in range(4000):
        one = lesson(seed)
        segments = chat_k3.render(one.messages, one.tools or None, thinking=one.thinking, generate=False)
        yield from (segment.text for segment in segments if isinstance(segment, Text))
    yield from _some(corpus_sources.python_docs(sources.python_docs, checking=False), 3_000_000)
    yield from _some(corpus_sources.sqlite_docs(sources.sqlite_docs), 700_000)
    for one in random.Random(5).sample(list(sources.written()), 3000):
        yield from (str(turn["content"]) for turn in one.messages)


def make(sources: Sources, folder: Path, out: Path, share: float) -> None:
    """The tokenizer into `folder` where it is not there yet, then a share of all rows into `out`."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "tokenizer.json").is_file():
        corpus_tokenizer.train(tokenizer_texts(sources), VOCAB, folder, CONTEXT_TOKENS)
    tokenizer = load_tokenizer(folder)
    maker = _Maker(sources, tokenizer, share)
    pad = tokenizer.special_id("[PAD]")
    arrays: dict[str, Any] = {}
    parts = {"short": (maker.short(), SHORT_TOKENS), "long": (maker.long(), LONG_TOKENS)}
    lengths = {"check_lessons": SHORT_TOKENS, "check_docs": SHORT_TOKENS, "check_needles": LONG_TOKENS}
    parts |= {name: (documents, lengths[name]) for name, documents in maker.checks().items()}
    for seed, (name, (documents, length)) in enumerate(parts.items()):
        ids, weights = corpus_rows.pack(documents, length, pad, seed)
        print(f"{name}: {len(documents)} documents, {ids.shape[0]} rows of {length}, {np.mean(ids != pad):.1%} filled")
        arrays |= {f"{name}_ids": ids, f"{name}_weights": weights}
    kept = "".join(maker.kept_docs)
    arrays["check_docs_bytes"] = np.array(len(kept.encode()))
    np.savez_compressed(out, **arrays)
    (folder / "data.json").write_text(json.dumps(sources.digests(), indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("python-docs", "sqlite-docs", "bfcl", "shared", "tokenizer"):
        parser.add_argument(f"--{name}", type=Path, required=True, metavar="DIR")
    parser.add_argument("--share", type=float, default=1.0, help="make only this share of the rows")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    sources = Sources(python_docs=args.python_docs, sqlite_docs=args.sqlite_docs, bfcl=args.bfcl, shared=args.shared)
    make(sources, args.tokenizer, args.out, args.share)


if __name__ == "__main__":
    main()

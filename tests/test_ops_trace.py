"""Traces are read or refused with a line number; hit rates of the recorded traces are the known ones."""

import gzip
import json
import random
from pathlib import Path

import pytest

from forebay.ops.prompt_text import Sizes, block_text, prompt_text
from forebay.ops.trace import BLOCK_TOKENS, Request, TraceError, infinite_cache, parse, read

TRACES = Path(__file__).resolve().parents[1].parent / "shared" / "traces"

KNOWN = {
    "mooncake/conversation_trace.jsonl": (12_031, 105_710, 288_500, 0.366412, 0.373624),
    "mooncake/synthetic_trace.jsonl": (3_993, 77_953, 121_877, 0.639604, 0.651244),
    "cc-weka/claude_code_16lanes_1h.mooncake.jsonl.gz": (2_219, 443_339, 470_555, 0.942162, 0.944355),
}


@pytest.mark.parametrize("name", KNOWN)
def test_infinite_cache_of_recorded_traces(name: str) -> None:
    if not (TRACES / name).exists():
        pytest.skip(f"needs the recorded trace {name} beside the repository")
    requests = read(TRACES / name)
    rate = infinite_cache(requests)
    told = (len(requests), rate.hit_blocks, rate.blocks, round(rate.by_block, 6), round(rate.by_token, 6))
    assert told == KNOWN[name]


def request(*hash_ids: int, tail: int = BLOCK_TOKENS, **others: object) -> Request:
    tokens = (len(hash_ids) - 1) * BLOCK_TOKENS + tail
    fields = {"timestamp_ms": 0.0, "output_tokens": 1, **others}
    return Request(input_tokens=tokens, hash_ids=hash_ids, **fields)  # type: ignore[arg-type]


def test_infinite_cache_equals_comparing_with_every_earlier_request() -> None:
    rng = random.Random(3)
    chains: list[tuple[int, ...]] = [()]
    requests = []
    for fresh in range(200):
        chains.append((*rng.choice(chains), fresh))
        requests.append(request(*chains[-1], tail=rng.randint(1, BLOCK_TOKENS)))
    rate = infinite_cache(requests)
    hits = [
        max((_common(r.hash_ids, earlier.hash_ids) for earlier in requests[:i]), default=0)
        for i, r in enumerate(requests)
    ]
    assert rate.hit_blocks == sum(hits)
    assert rate.hit_tokens == sum(min(h * BLOCK_TOKENS, r.input_tokens) for h, r in zip(hits, requests, strict=True))
    assert 0 < rate.by_block < 1


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


GOOD = {"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [0, 7], "unknown": "kept out"}


def test_a_row_is_read_with_its_session(tmp_path: Path) -> None:
    lines = json.dumps(GOOD) + "\n\n" + json.dumps({**GOOD, "session_id": "s"}) + "\n"
    (tmp_path / "plain.jsonl").write_text(lines)
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    first, second = read(tmp_path / "plain.jsonl")
    assert first == Request(timestamp_ms=5, input_tokens=600, output_tokens=3, hash_ids=(0, 7))
    assert second.session == "s"
    assert read(tmp_path / "packed.jsonl.gz") == [first, second]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"input_length": 0}, r"line 2: .*>= 1.*\$\.input_length"),
        ({"output_length": "3"}, r"line 2: .*\$\.output_length"),
        ({"hash_ids": [0, -7]}, r"line 2: .*\$\.hash_ids"),
        ({"hash_ids": [0]}, "line 2: 600 input tokens are 2 blocks of 512, but hash_ids has 1"),
        ({"timestamp": None}, r"line 2: .*\$\.timestamp"),
    ],
)
def test_a_bad_row_is_named(change: dict[str, object], complaint: str) -> None:
    rows = [GOOD, {**GOOD, **change}]
    with pytest.raises(TraceError, match=complaint):
        parse([json.dumps(row).encode() for row in rows], "t")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(b"{", "line 1"), (b"[1]", "line 1"), (b"", "no requests"), (b'{"timestamp": 1}', "input_length")],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    (tmp_path / "t.jsonl").write_bytes(content)
    with pytest.raises(TraceError, match=complaint):
        read(tmp_path / "t.jsonl")


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.gz").write_bytes(b"not packed")
    for path in (tmp_path / "absent", tmp_path / "t.gz"):
        with pytest.raises(TraceError, match="cannot be read"):
            read(path)


def test_equal_ids_give_equal_text_block_by_block() -> None:
    sizes = Sizes(block_tokens=32)
    one = prompt_text(request(0, 5, 9, tail=100), sizes)
    other = prompt_text(request(0, 5, 11, 12), sizes)
    assert one[:64] == other[:64]
    assert one[64:66] != other[64:66]
    assert len(one) == 64 + 7  # 100 of 512 tokens, rounded up
    assert len(other) == 4 * 32
    assert one.isascii()


def test_block_text_has_its_length_and_depends_on_the_id_alone() -> None:
    texts = {block_text(block, 200) for block in range(500)}
    assert len(texts) == 500
    assert {len(text) for text in texts} == {200}
    before = block_text(7, 200)
    block_text.cache_clear()
    assert block_text(7, 200) == before


def test_sizes_scale_prompts_and_cap_answers() -> None:
    one = request(0, 1, tail=1, output_tokens=512)
    assert Sizes().prompt_tokens(one) == 513
    assert Sizes(block_tokens=32).prompt_tokens(one) == 33
    assert len(prompt_text(one, Sizes(block_tokens=32))) == 33
    assert Sizes(block_tokens=32, chars_per_token=4).block_chars == 128
    assert Sizes(block_tokens=32).output_tokens(one) == 32
    assert Sizes(block_tokens=32, output_cap=5).output_tokens(one) == 5
    assert Sizes(block_tokens=32).output_tokens(request(0, output_tokens=0)) == 1

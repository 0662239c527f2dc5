"""Recorded sessions in the weka form: both ways to write blocks, sub-agents, lanes, and what is no session."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from forebay.ops import weka
from forebay.ops.trace import TraceError


def request(t: float, ids: list[int], **more: Any) -> dict[str, Any]:
    return {"type": "s", "t": t, "in": 64 * len(ids) + 5, "out": 1, "stop": "tool_use", "hash_ids": ids} | more


def document(*requests: dict[str, Any], name: str = "a", **more: Any) -> dict[str, Any]:
    return {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": list(requests)} | more


def parsed(*documents: dict[str, Any], block_tokens: int = 64) -> list[weka.Session]:
    return weka.parse(b"\n".join(json.dumps(each).encode() for each in documents), "a file", block_tokens)


def blocks(session: weka.Session) -> list[list[int]]:
    return [call.blocks.tolist() for call in session.calls]


def test_runs_stand_for_ids() -> None:
    plain = document(request(0, [1, 2, 3, 4]), request(1, [1, 2, 3, 9, 10, 11, 30]))
    runs = document(request(0, [], hash_ids=None, h=[0, 1, 4]), request(1, [], hash_ids=None, h=[3, 9, 3, 30, 1]))
    assert blocks(parsed(plain)[0]) == blocks(parsed(runs)[0]) == [[1, 2, 3, 4], [1, 2, 3, 9, 10, 11, 30]]


def test_a_longer_block_has_the_name_of_its_last_part() -> None:
    assert blocks(parsed(document(request(0, list(range(20)))), block_tokens=512)[0]) == [[7, 15]]


def test_sub_agents_come_in_time_order_and_may_count_from_their_spawn() -> None:
    inner = {"type": "subagent", "t": 10, "requests": [request(2, [5]), request(30, [6])]}
    session = parsed(document(request(0, [1]), inner, request(20, [2])))[0]
    assert [(call.at_s, call.blocks.tolist()) for call in session.calls] == [(0, [1]), (12, [5]), (20, [2]), (30, [6])]


def test_a_file_is_one_document_or_one_a_line_plain_or_gz(tmp_path: Path) -> None:
    whole = document(request(0, [1]))
    (tmp_path / "one.json").write_text(json.dumps(whole, indent=1))
    with gzip.open(tmp_path / "many.jsonl.gz", "wt") as file:
        file.write(json.dumps(whole) + "\n\n" + json.dumps(whole | {"id": "b"}) + "\n")
    assert [session.id for session in weka.read(tmp_path / "one.json")] == ["a"]
    assert [session.id for session in weka.read(tmp_path / "many.jsonl.gz")] == ["a", "b"]
    assert weka.is_weka(tmp_path / "one.json")
    assert weka.is_weka(tmp_path / "many.jsonl.gz")


def test_a_mooncake_row_is_no_session(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [0]}\n')
    assert not weka.is_weka(tmp_path / "m.jsonl")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "a file"),
        (b"{", "a file"),
        (json.dumps(document(block_size=16)).encode(), "block_size is 16"),
        (json.dumps(document()).encode(), "no calls"),
        (json.dumps(document(request(0, [], hash_ids=None))).encode(), "neither hash_ids nor h"),
        (json.dumps(document(request(0, [], hash_ids=None, h=[4, 1, 2]))).encode(), "neither hash_ids nor h"),
        (json.dumps(document(request(0, [], hash_ids=None, h=[0, 1]))).encode(), "neither hash_ids nor h"),
    ],
)
def test_what_is_wrong_is_told(data: bytes, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        weka.parse(data, "a file")


def test_lanes_cut_gaps_and_take_the_next_session() -> None:
    sessions = parsed(
        document(request(3, [1]), request(103, [2]), name="a"),
        document(request(0, [1]), name="b"),
        document(request(0, [1]), request(7, [2]), name="c"),
    )
    seen = [(visit.at_s, visit.session) for visit in weka.lanes(sessions, 2, 75)]
    assert seen == [(0, "a/0"), (5, "b/0"), (15, "c/0"), (22, "c/0"), (32, "a/1"), (60, "a/0"), (70, "b/1")]

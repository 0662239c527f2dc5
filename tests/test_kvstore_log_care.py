"""The verbs that look after the SSD tier's files: they see what is there, and drop only what can never be hit."""

import json
from pathlib import Path

import pytest

from forebay.cluster.cli import main
from forebay.kvstore.log_care import collect, logs, survey
from forebay.kvstore.log_folder import LogError, file_of, numbers
from tests.kvstore_twin import Owner
from tests.test_kvstore_ssd import LAYOUT, config, memory_of, serve

OWNER = Owner()


def filled(folder: Path) -> list[list[int]]:
    """Three sessions of four turns, each of which leaves a longer run and one more checkpoint, in several segments."""
    prompts = [[session] * (8 * turn + 9) for turn in range(4) for session in range(3)]
    roomy = config(folder, device_bytes=400 * LAYOUT.page_bytes, ssd_bytes=400 * 4096, ssd_write="write_through")
    with memory_of(roomy) as memory:
        for ids in prompts:
            serve(memory, ids)
    return prompts


def hits(folder: Path, prompts: list[list[int]]) -> list[int]:
    with memory_of(config(folder, ssd_bytes=400 * 4096)) as memory:
        return [memory.store.lookup(memory.store.chain(ids), len(ids)).tokens for ids in prompts]


def test_what_can_never_be_hit_goes_and_all_else_stays(tmp_path: Path) -> None:
    prompts = filled(tmp_path)
    log = tmp_path / "ssd" / "slot-00"
    before, size = hits(tmp_path, prompts), sum(each.n_bytes for each in survey(log, verify=False))
    assert len(numbers(log)) > 1
    done = collect(log)
    assert done.dropped_records > 0
    assert done.freed_bytes > 0
    assert done.left_bytes == size - done.freed_bytes == sum(each.n_bytes for each in survey(log, verify=False))
    assert hits(tmp_path, prompts) == before
    assert not any(each.damage for each in survey(log, verify=True))
    assert collect(log).dropped_records == 0


def test_a_checkpoint_that_lacks_a_part_goes_whole(tmp_path: Path) -> None:
    filled(tmp_path)
    log = tmp_path / "ssd" / "slot-00"
    collect(log)
    each = next(each for each in survey(log, verify=True) if any(found.record.parts > 1 for found in each.found))
    part = next(found for found in each.found if found.record.parts > 1)
    path = file_of(log, each.segment)
    image = bytearray(path.read_bytes())
    image[part.place.offset + part.place.n_bytes - 1] ^= 1
    path.write_bytes(image)
    assert collect(log).dropped_records == 1, "its sibling; the damaged one was no record any more"


def test_no_more_than_is_kept(tmp_path: Path) -> None:
    filled(tmp_path)
    log = tmp_path / "ssd" / "slot-00"
    newest = numbers(log)[-1]
    done = collect(log, keep_bytes=200_000)
    assert done.left_bytes <= 200_000
    assert numbers(log)[-1] == newest


def test_a_running_worker_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with memory_of(config(tmp_path)):
        assert main(["store", "gc", str(tmp_path / "ssd")]) == 2
        told = capsys.readouterr().err
        assert "in use by process" in told
        assert told.count("\n") == 1
        assert main(["store", "ls", str(tmp_path / "ssd")]) == 0


def test_where_there_is_no_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LogError, match="no such folder"):
        logs(tmp_path / "none")
    assert main(["store", "ls", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"forebay: {tmp_path}: holds no log of the SSD tier\n"


def test_the_verbs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tmp_path)
    path = str(tmp_path / "ssd")
    assert main(["store", "ls", path, "--json"]) == 0
    segments = json.loads(capsys.readouterr().out)
    assert main(["store", "inspect", path, "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert sum(each["records"] for each in segments) == len(records) > 40
    assert {each["group"] for each in records} == {"latent", "index", "kda0", "kda1"}
    assert main(["store", "verify", path]) == 0
    assert f"{len(records)} records intact" in capsys.readouterr().out
    victim = file_of(tmp_path / "ssd" / "slot-00", segments[0]["segment"])
    image = bytearray(victim.read_bytes())
    image[300] ^= 1
    victim.write_bytes(image)
    assert main(["store", "verify", path]) == 1
    assert "is damaged" in capsys.readouterr().out
    assert main(["store", "gc", path]) == 0
    assert "freed_bytes" in capsys.readouterr().out
    assert main(["store", "verify", path]) == 0

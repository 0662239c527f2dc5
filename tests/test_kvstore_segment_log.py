"""The log by itself: what is acknowledged was synced, one sync serves many, and the accounting of segments adds up."""

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from forebay.kvstore.log_folder import Place
from forebay.kvstore.moves import Label
from forebay.kvstore.record import ALIGN_BYTES, NoRecord, OtherVersion, Record, pack, unpack
from forebay.kvstore.segment_log import Part, SegmentLog
from forebay.kvstore.segments import Segments

keys = st.binary(min_size=32, max_size=32)
labels = st.builds(
    Label,
    group=st.text(min_size=1, max_size=12),
    keys=st.lists(keys, min_size=1, max_size=200).map(tuple),
    before=st.none() | keys,
    start_tokens=st.integers(0, 1 << 40),
    end_tokens=st.integers(0, 1 << 40),
)
records = st.builds(
    Record,
    label=labels,
    fingerprint=keys,
    part=st.just(1),
    parts=st.integers(2, 8),
    rows=st.integers(1, 99),
    n_bytes=st.integers(0, 1 << 50),
    checksum=st.integers(0, (1 << 64) - 1),
    sequence=st.integers(0, 1 << 60),
)


@given(records, st.integers(0, 1 << 20), st.integers(0, 7))
def test_a_header_says_what_it_was_told_and_bears_no_flipped_bit(record: Record, at: int, bit: int) -> None:
    header = pack(record)
    assert unpack(header + b"data") == record
    assert len(header) == record.header_bytes
    assert record.total_bytes % ALIGN_BYTES == 0
    wrong = bytearray(header)
    wrong[at % len(header)] ^= 1 << bit
    with pytest.raises(NoRecord):
        unpack(bytes(wrong))
    for cut in {0, 3, 11, at % len(header)}:
        with pytest.raises(NoRecord):
            unpack(header[:cut])


@given(records)
def test_another_version_is_told_from_no_record(record: Record) -> None:
    header = bytearray(pack(record))
    header[4] += 1
    with pytest.raises(OtherVersion):
        unpack(bytes(header))


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 9), st.booleans()), max_size=80), st.integers(120, 400))
def test_segments_stay_below_the_quota_and_spare_what_is_pinned(acts: list[tuple[int, int, bool]], quota: int) -> None:
    """Against a twin that keeps every record by itself."""
    segments, twin, order = Segments(quota, 60), {}, []
    for n_bytes, which, pins in acts:
        held = [number for number in order if number in segments.held]
        pinned = set(held[which : which + 2]) if pins else set()
        if held and which % 3 == 0:
            segments.use(held[which % len(held)])
            order.remove(held[which % len(held)])
            order.append(held[which % len(held)])
        placed = segments.place(n_bytes, lambda pinned=pinned: pinned)  # type: ignore[misc]
        segments.check()
        if placed is None:
            assert pins, "only what is pinned refuses"
            continue
        assert pinned.isdisjoint(placed.dropped)
        for number in placed.dropped:
            earlier = order[: order.index(number)]
            assert all(other in pinned or other not in segments.held for other in earlier), "the longest unused first"
            order.remove(number)
            del twin[number]
        assert placed.offset == twin.get(placed.segment, 0)
        twin[placed.segment] = placed.offset + n_bytes
        order = [number for number in order if number != placed.segment] + [placed.segment]
        assert {number: each.n_bytes for number, each in segments.held.items()} == twin


@pytest.fixture
def log(tmp_path: Path) -> Iterator[SegmentLog]:
    log = open_log(tmp_path)
    yield log
    log.close()


def open_log(path: Path) -> SegmentLog:
    return SegmentLog(path, quota_bytes=1 << 22, segment_bytes=1 << 19, queue_bytes=1 << 20, fingerprint=b"m" * 32)


def append(log: SegmentLog, number: int, n_bytes: int = 6000) -> Place:
    label = Label(group="g", keys=(bytes([number]) * 32,), before=None, start_tokens=0, end_tokens=1)
    data = np.full((2, n_bytes // 2), number, dtype=np.uint8)
    places = log.append([Part(label=label, data=data)], tuple)
    assert places is not None
    return places[0]


def test_nothing_is_acknowledged_before_its_sync(log: SegmentLog, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, sync = threading.Event(), os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: gate.wait(30) and sync(descriptor))
    places = [append(log, number) for number in range(20)]
    assert not log.flush(0.1)
    assert log.acknowledged == -1
    for number, place in enumerate(places):
        data = log.fetch(place).result()
        assert data is not None
        assert set(data.tolist()) == {number}, "readable at once"
    gate.set()
    assert log.flush(30)
    assert log.acknowledged == 19
    assert log.syncs <= 2, "what came while the first was written went in one group"


def test_what_is_on_the_disk_is_read_back(log: SegmentLog, tmp_path: Path) -> None:
    places = [append(log, number) for number in range(40)]
    assert log.flush(30)
    for number, place in enumerate(places):
        data = log.fetch(place).result()
        assert data is not None
        assert set(data.tolist()) == {number}
        log.give_back(data)
    assert log.fetch(replace(places[3], checksum=places[4].checksum)).result() is None
    log.close()
    again = open_log(tmp_path)
    assert [found.place for found in again.found] == places
    assert [found.record.sequence for found in again.found] == list(range(40))
    append(again, 7)
    assert again.flush(30)
    assert again.acknowledged == 40, "sequence numbers go on"
    again.close()


def test_a_queue_without_room_says_so_and_goes_on_later(log: SegmentLog, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, sync = threading.Event(), os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: gate.wait(30) and sync(descriptor))
    label = Label(group="g", keys=(bytes(32),), before=None, start_tokens=0, end_tokens=1)
    part = Part(label=label, data=np.zeros((1, 400_000), dtype=np.uint8))
    taken = [log.append([part], tuple) for _ in range(4)]
    assert [places is not None for places in taken] == [True, True, False, False]
    assert log.events == {"skipped": 2}
    log.segments.check()
    gate.set()
    assert log.flush(30)
    assert log.append([part], tuple) is not None


def test_a_failing_read_ends_the_tier(log: SegmentLog, monkeypatch: pytest.MonkeyPatch) -> None:
    place = append(log, 1)
    assert log.flush(30)

    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    assert log.fetch(place).result() is None
    assert "Input/output error" in (log.failure or "")
    monkeypatch.undo()
    assert log.fetch(place).result() is None
    assert (
        log.append(
            [
                Part(
                    label=Label(group="g", keys=(bytes(32),), before=None, start_tokens=0, end_tokens=1),
                    data=np.zeros((1, 9), dtype=np.uint8),
                )
            ],
            tuple,
        )
        is None
    )

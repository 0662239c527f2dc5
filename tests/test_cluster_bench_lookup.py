"""The rows of `forebay bench store` on hashing, look-up and checksums, on little."""

import pytest

from forebay.cluster import bench_lookup
from forebay.ops.bench_report import report, table


def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PROMPT_TOKENS": 1 << 14, "ROUNDS": 1, "COPY_BYTES": 1 << 20, "COPIED_BYTES": 2 << 20}.items():
        monkeypatch.setattr(bench_lookup, name, value)
    rows = list(bench_lookup.bench_lookup())
    assert [row.name for row in rows] == [
        "hashing 16384 tokens, blocks of 512",
        "the same of a known session, 4096 of them new",
        "look-up of 32 blocks in 4 groups",
        "copy with its checksum, 1 MiB each",
    ]
    assert all(row.value > 0 for row in rows)
    assert "copy alone" in table(report(rows))

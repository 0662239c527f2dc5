"""The record of the log on disk: one group's rows of one page, or one KDA group's states, and all to find it again.

    header   fixed fields | group's name | block keys | zeros up to a multiple of 64, less 8 | checksum of all before
    data     `rows` rows of equal length, as they lay in pages
    zeros    up to a multiple of ALIGN_BYTES

Every record starts at a multiple of ALIGN_BYTES and says by itself what it is, so that damage to one costs that one:
whoever cannot read a header goes on at the next multiple that holds one. Pure.
"""

import struct
from dataclasses import dataclass

import xxhash

from forebay.kvstore.moves import Label

MAGIC = b"FBYR"
VERSION = 1
ALIGN_BYTES = 4096
HEADER_ALIGN_BYTES = 64
HEADER_BYTES_MAX = 1 << 22
CHECKSUM_BYTES = 8
_START = struct.Struct("<4sHxxI")
_FIXED = struct.Struct("<4sHBBIIQQQQQHBB4x32s32s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """`label` with the name of one group; `part` of `parts`: which KDA group of a checkpoint (0 of 1 for rows).

    `checksum` is xxh3_64 of the data's `n_bytes`, `fingerprint` (32 bytes) names the model, `sequence` grows with every
    record that a log writes, over restarts too: order on disk needs no clock.
    """

    label: Label
    fingerprint: bytes
    part: int
    parts: int
    rows: int
    n_bytes: int
    checksum: int
    sequence: int

    @property
    def row_bytes(self) -> int:
        return self.n_bytes // self.rows

    @property
    def header_bytes(self) -> int:
        label = self.label
        n_bytes = _FIXED.size + len(label.group.encode()) + sum(map(len, label.keys)) + CHECKSUM_BYTES
        return _up(n_bytes, HEADER_ALIGN_BYTES)

    @property
    def total_bytes(self) -> int:
        """What it takes in its segment, zeros included."""
        return _up(self.header_bytes + self.n_bytes, ALIGN_BYTES)


class NoRecord(Exception):
    """These bytes are no header that this version can read."""


class OtherVersion(NoRecord):
    """A header, but of another format version."""


def pack(record: Record) -> bytes:
    """The header."""
    label = record.label
    name, header_bytes = label.group.encode(), record.header_bytes
    fixed = _FIXED.pack(
        MAGIC,
        VERSION,
        record.part,
        record.parts,
        header_bytes,
        record.rows,
        record.n_bytes,
        record.checksum,
        record.sequence,
        label.start_tokens,
        label.end_tokens,
        len(label.keys),
        len(name),
        label.before is not None,
        record.fingerprint,
        label.before or bytes(32),
    )
    body = (fixed + name + b"".join(label.keys)).ljust(header_bytes - CHECKSUM_BYTES, b"\0")
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(CHECKSUM_BYTES, "little")


def header_bytes(start: bytes) -> int:
    """Length of the header that begins with `start` (at least 12 bytes). Raises NoRecord."""
    if len(start) < _START.size:
        raise NoRecord
    magic, version, n_bytes = _START.unpack_from(start)
    if magic != MAGIC:
        raise NoRecord
    if version != VERSION:
        raise OtherVersion
    if not _FIXED.size < n_bytes <= HEADER_BYTES_MAX or n_bytes % HEADER_ALIGN_BYTES:
        raise NoRecord
    return int(n_bytes)


def unpack(header: bytes) -> Record:
    """The record of a whole header, verified. Raises NoRecord."""
    n_bytes = header_bytes(header)
    body, given = header[: n_bytes - CHECKSUM_BYTES], header[n_bytes - CHECKSUM_BYTES : n_bytes]
    if xxhash.xxh3_64_intdigest(body).to_bytes(CHECKSUM_BYTES, "little") != given:
        raise NoRecord
    _, _, part, parts, _, rows, data, checksum, sequence, start, end, n_keys, n_name, known, fingerprint, before = (
        _FIXED.unpack_from(body)
    )
    if not n_keys or not rows or not parts or part >= parts:
        raise NoRecord
    name_end = _FIXED.size + n_name
    keys = tuple(body[name_end + 32 * i : name_end + 32 * (i + 1)] for i in range(n_keys))
    label = Label(
        group=body[_FIXED.size : name_end].decode(errors="replace"),
        keys=keys,
        before=before if known else None,
        start_tokens=start,
        end_tokens=end,
    )
    return Record(
        label=label,
        fingerprint=fingerprint,
        part=part,
        parts=parts,
        rows=rows,
        n_bytes=data,
        checksum=checksum,
        sequence=sequence,
    )


def _up(n_bytes: int, multiple: int) -> int:
    return -(-n_bytes // multiple) * multiple

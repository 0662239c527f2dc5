"""The record of the log on disk: one group's rows of one page, or one KDA group's states, and all to find it again.

    header   fixed fields | group's name | class | block keys | zeros up to a multiple of 64, less 8 | checksum of all
             before but the state, which alone changes in place
    data     `rows` rows of equal length, as they lay in pages
    zeros    up to a multiple of ALIGN_BYTES

Every record starts at a multiple of ALIGN_BYTES and says by itself what it is, so that damage to one costs that one:
whoever cannot read a header goes on at the next multiple that holds one. Pure.
"""

import struct
from dataclasses import dataclass

import xxhash

from forebay.kvstore.moves import MARK_BYTES, Label, Origin

MAGIC = b"FBYR"
VERSION = 2
ALIGN_BYTES = 4096
HEADER_ALIGN_BYTES = 64
HEADER_BYTES_MAX = 1 << 22
CHECKSUM_BYTES = 8
STATE_AT = 24
"""Where in a record its state lies, 8 bytes that are written at once."""

ALONE, SHARED, ERASED = b"ALONE\x9c\x3b\x05", b"SHARED\xe1\x70", b"ERASED\x1f\xd8"
"""States: used by its session only; by others too; erased."""

_START = struct.Struct("<4sHxxI4xQ8s")
_FIXED = struct.Struct("<4sHBBIIQ8sQQQQQHBBH2x32s32s16s16s")


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
        names = len(label.group.encode()) + len(label.origin.class_name.encode())
        n_bytes = _FIXED.size + names + sum(map(len, label.keys)) + CHECKSUM_BYTES
        return _up(n_bytes, HEADER_ALIGN_BYTES)

    @property
    def total_bytes(self) -> int:
        """What it takes in its segment, zeros included."""
        return _up(self.header_bytes + self.n_bytes, ALIGN_BYTES)


class NoRecord(Exception):
    """These bytes are no header that this version can read."""


class Erased(NoRecord):
    """A record was here, `total_bytes` long."""

    def __init__(self, total_bytes: int) -> None:
        super().__init__()
        self.total_bytes = total_bytes


class OtherVersion(NoRecord):
    """A header, but of another format version."""


def pack(record: Record) -> bytes:
    """The header."""
    label, origin = record.label, record.label.origin
    name, class_name, header_bytes = label.group.encode(), origin.class_name.encode(), record.header_bytes
    fixed = _FIXED.pack(
        MAGIC,
        VERSION,
        record.part,
        record.parts,
        header_bytes,
        record.rows,
        record.total_bytes,
        bytes(8),
        record.n_bytes,
        record.checksum,
        record.sequence,
        label.start_tokens,
        label.end_tokens,
        len(label.keys),
        len(name),
        label.before is not None,
        len(class_name),
        record.fingerprint,
        label.before or bytes(32),
        origin.session,
        origin.tenant,
    )
    body = (fixed + name + class_name + b"".join(label.keys)).ljust(header_bytes - CHECKSUM_BYTES, b"\0")
    return _with_state(body, ALONE if origin.session else SHARED) + _checksum(body)


def erased(total_bytes: int) -> bytes:
    """The header that takes the place of an erased record's: HEADER_ALIGN_BYTES, written at once."""
    start = _START.pack(MAGIC, VERSION, HEADER_ALIGN_BYTES, total_bytes, bytes(8))
    body = start.ljust(HEADER_ALIGN_BYTES - CHECKSUM_BYTES, b"\0")
    return _with_state(body, ERASED) + _checksum(body)


def header_bytes(start: bytes) -> int:
    """Length of the header that begins with `start` (at least 64 bytes). Raises NoRecord."""
    if len(start) < HEADER_ALIGN_BYTES:
        raise NoRecord
    magic, version, n_bytes, total_bytes, state = _START.unpack_from(start)
    if magic != MAGIC:
        raise NoRecord
    if version != VERSION:
        raise OtherVersion
    if state == ERASED and start[:HEADER_ALIGN_BYTES] == erased(total_bytes):
        raise Erased(total_bytes)
    if state not in (ALONE, SHARED):
        raise NoRecord
    if not _FIXED.size < n_bytes <= HEADER_BYTES_MAX or n_bytes % HEADER_ALIGN_BYTES:
        raise NoRecord
    return int(n_bytes)


def unpack(header: bytes) -> Record:
    """The record of a whole header, verified. Raises NoRecord."""
    n_bytes = header_bytes(header)
    alone = header[STATE_AT : STATE_AT + 8] == ALONE
    body = _with_state(header[: n_bytes - CHECKSUM_BYTES], bytes(8))
    if _checksum(body) != header[n_bytes - CHECKSUM_BYTES : n_bytes]:
        raise NoRecord
    _, _, part, parts, _, rows, _, _, data, checksum, sequence, start, end, n_keys, n_name, known, n_class, *marks = (
        _FIXED.unpack_from(body)
    )
    fingerprint, before, session, tenant = marks
    if not n_keys or not rows or not parts or part >= parts:
        raise NoRecord
    name_end = _FIXED.size + n_name
    class_end = name_end + n_class
    keys = tuple(body[class_end + 32 * i : class_end + 32 * (i + 1)] for i in range(n_keys))
    origin = Origin(
        class_name=body[name_end:class_end].decode(errors="replace"),
        session=session if alone else b"",
        tenant=b"" if tenant == bytes(MARK_BYTES) else tenant,
    )
    label = Label(
        group=body[_FIXED.size : name_end].decode(errors="replace"),
        keys=keys,
        before=before if known else None,
        start_tokens=start,
        end_tokens=end,
        origin=origin,
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


def _with_state(body: bytes, state: bytes) -> bytes:
    return body[:STATE_AT] + state + body[STATE_AT + 8 :]


def _checksum(body: bytes) -> bytes:
    """Of a header whose state is zeros."""
    return xxhash.xxh3_64_intdigest(body).to_bytes(CHECKSUM_BYTES, "little")


def _up(n_bytes: int, multiple: int) -> int:
    return -(-n_bytes // multiple) * multiple

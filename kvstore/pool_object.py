"""An object of the cluster-wide pool: one unit with all its layers, and all to know it by. Pure.

    name      model mark | group | key of the unit's last block | blocks of its run
    bytes     header (record.py) | `rows` rows of equal length, as they lay in pages

A span's object holds its run of blocks of all layers of its group, a checkpoint's the states of all KDA groups. So an
object of a released model has megabytes (K3 at TP1, bf16 rows: 162 MiB a full latent page, 428 MiB a checkpoint),
while one of a built-in model has kilobytes, and pays for each what a large one does.

The name says what the bytes must be, so that two who have the same thing store it once, and who knows a prompt knows
the names. The header says it again, with the checksum: what is read is believed only where both agree.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from forebay.kvstore.checksum import checksum, copy_checked
from forebay.kvstore.layout import Layout
from forebay.kvstore.lookup import STATES
from forebay.kvstore.moves import NOBODY, Label
from forebay.kvstore.record import NoRecord, Record, pack, unpack

Bytes = npt.NDArray[np.uint8]
MARK_CHARS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolObject:
    """What `label` names, for the model of `mark` (32 bytes): `rows` rows of `row_bytes` each, behind a header."""

    label: Label
    mark: bytes
    rows: int
    row_bytes: int

    @property
    def name(self) -> str:
        """Letters, digits, dots and dashes: it may become a file's name."""
        label = self.label
        mark, key = self.mark.hex()[:MARK_CHARS], label.keys[-1].hex()
        return f"forebay.{mark}.{label.group}.{key}.{len(label.keys)}"

    @property
    def header_bytes(self) -> int:
        return self._record(0).header_bytes

    @property
    def total_bytes(self) -> int:
        return self.header_bytes + self.rows * self.row_bytes

    def data_of(self, image: Bytes) -> Bytes:
        """The rows within an image of `total_bytes` bytes: [rows, row_bytes], sharing its memory."""
        start = self.header_bytes
        return image[start : start + self.rows * self.row_bytes].reshape(self.rows, self.row_bytes)

    def fill(self, image: Bytes, rows: Bytes) -> None:
        """Copy the rows, [rows, row_bytes], and put the header before them, with the checksum of what arrived."""
        header = pack(self._record(copy_checked(self.data_of(image), rows)))
        image[: len(header)] = np.frombuffer(header, dtype=np.uint8)

    def is_whole(self, image: Bytes) -> bool:
        """Is this the image of this object, every byte of it?"""
        try:
            record = unpack(image[: self.header_bytes].tobytes())
        except NoRecord:
            return False
        # Who kept a checkpoint knew another one before it, perhaps; what it holds is the same.
        same = record.label.group == self.label.group and record.label.keys == self.label.keys
        sizes = (record.fingerprint, record.label.end_tokens, record.rows, record.n_bytes)
        wanted = (self.mark, self.label.end_tokens, self.rows, self.rows * self.row_bytes)
        return same and sizes == wanted and checksum(self.data_of(image)) == record.checksum

    def _record(self, of_data: int) -> Record:
        """Whose it was is not in it: who reads it knows the prompt only, and from that the header's length."""
        return Record(
            label=replace(self.label, origin=NOBODY),
            fingerprint=self.mark,
            part=0,
            parts=1,
            rows=self.rows,
            n_bytes=self.rows * self.row_bytes,
            checksum=of_data,
            sequence=0,
        )


def object_of(layout: Layout, mark: bytes, label: Label) -> PoolObject:
    """The object of a unit of this layout."""
    if label.group == STATES:
        return PoolObject(label=label, mark=mark, rows=layout.state_pages, row_bytes=layout.state_bytes)
    group = next(group for group in layout.paged if group.name == label.group)
    row_bytes = len(label.keys) * layout.block_tokens * group.row_bytes
    return PoolObject(label=label, mark=mark, rows=len(group.layers), row_bytes=row_bytes)


def largest_bytes(layout: Layout) -> int:
    """What the largest object of this layout takes."""
    full = [
        Label(group=group.name, keys=(bytes(32),) * blocks, before=None, start_tokens=0, end_tokens=group.page_tokens)
        for group in layout.paged
        if (blocks := group.page_tokens // layout.block_tokens)
    ]
    if layout.states:
        full.append(Label(group=STATES, keys=(bytes(32),), before=None, start_tokens=0, end_tokens=0))
    return max(object_of(layout, bytes(32), label).total_bytes for label in full)

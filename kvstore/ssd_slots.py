"""Which folder a worker's log lies in: the first of the numbered ones below the configured path that nobody holds.

    PATH/slot-00, PATH/slot-01 ...

Workers of one node share the path, not a folder: who starts takes the first free one, so a worker that takes a dead
one's place finds what that one wrote.
"""

from pathlib import Path

from forebay.kvstore.chain import KEY_BYTES
from forebay.kvstore.config import StoreConfig
from forebay.kvstore.layout import Layout
from forebay.kvstore.log_folder import LogBusy, LogError
from forebay.kvstore.record import ALIGN_BYTES
from forebay.kvstore.segment_log import SegmentLog

SLOTS = "slot-*"
SLOTS_MAX = 64
SEGMENTS = 8
SEGMENT_BYTES_MAX = 1 << 30


def open_log(layout: Layout, config: StoreConfig, mark: bytes) -> SegmentLog:
    """Raises LogError: what is wrong with the path, or that the quota is too small for this model."""
    assert config.ssd_path is not None
    largest = _largest_bytes(layout)
    segment_bytes = max(min(config.ssd_bytes // SEGMENTS, SEGMENT_BYTES_MAX), largest)
    if 2 * segment_bytes > config.ssd_bytes:
        raise LogError(f"{config.ssd_path}: ssd_bytes: this model takes at least {2 * segment_bytes}")
    for slot in range(SLOTS_MAX):
        try:
            return SegmentLog(
                Path(config.ssd_path) / f"slot-{slot:02}",
                quota_bytes=config.ssd_bytes,
                segment_bytes=segment_bytes,
                queue_bytes=max(config.ssd_queue_bytes // ALIGN_BYTES * ALIGN_BYTES, largest),
                fingerprint=mark,
            )
        except LogBusy:
            continue
    raise LogError(f"{config.ssd_path}: all {SLOTS_MAX} slots are in use")


def _largest_bytes(layout: Layout) -> int:
    """What the largest unit takes in the log, at most."""
    most = max((len(group.layers) for group in layout.paged), default=0)
    pages = max(most, layout.state_pages)
    keys_bytes = max((group.page_tokens // layout.block_tokens for group in layout.paged), default=1) * KEY_BYTES
    largest = pages * layout.page_bytes + max(1, len(layout.states)) * (2 * ALIGN_BYTES + keys_bytes)
    return -(-largest // ALIGN_BYTES) * ALIGN_BYTES

"""JSON lines: what happened, never what was said.

Written by a thread of their own through a bounded queue, so a terminal or a pipe that nobody reads stops the lines and
not the router. Lines that found no room are counted in the next one that did.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

import msgspec

Log = Callable[[dict[str, object]], None]

QUEUED_LINES = 10_000
LAST_LINES_S = 1.0  # for what is queued to be written when the router ends


@contextmanager
def writing(out: BinaryIO) -> Iterator[Log]:
    """A log into `out`, open while the context is."""
    lines: queue.Queue[bytes | None] = queue.Queue(QUEUED_LINES)
    dropped = 0

    def write(fields: dict[str, object]) -> None:
        nonlocal dropped
        lost: dict[str, object] = {"lines_dropped": dropped} if dropped else {}
        line = msgspec.json.encode({"at": round(time.time(), 3), "room": "router"} | fields | lost) + b"\n"
        try:
            lines.put_nowait(line)
            dropped = 0
        except queue.Full:
            dropped += 1

    thread = threading.Thread(target=_write_all, args=(lines, out), name="router-log", daemon=True)
    thread.start()
    try:
        yield write
    finally:
        try:
            lines.put(None, timeout=LAST_LINES_S)
            thread.join(LAST_LINES_S)
        except queue.Full:
            pass  # nobody reads: the lines end here


def _write_all(lines: "queue.Queue[bytes | None]", out: BinaryIO) -> None:
    try:
        while (line := lines.get()) is not None:
            out.write(line)
            out.flush()
    except (OSError, ValueError):
        pass  # the other end is closed: from here on lines fill the queue and are dropped

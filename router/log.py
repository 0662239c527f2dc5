"""JSON lines to stderr: what happened, never what was said."""

import sys
import time
from collections.abc import Callable

import msgspec

Log = Callable[[dict[str, object]], None]


def to_stderr(fields: dict[str, object]) -> None:
    """One line, one write: lines of several processes on one terminal stay whole."""
    line = msgspec.json.encode({"at": round(time.time(), 3), "room": "router"} | fields) + b"\n"
    sys.stderr.buffer.write(line)
    sys.stderr.buffer.flush()

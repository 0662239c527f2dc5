"""Every process below this one is written down while it lives, and is dead when the block ends."""

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Iterator

from forebay.cluster import processes
from forebay.cluster.processes import Process
from forebay.cluster.rundir import RunDir

RECORD_EVERY_S = 0.5
PR_SET_CHILD_SUBREAPER = 36
ROUNDS = 5
"""A process that is being ended may just have started another: so often its descendants are looked for again."""


@contextlib.contextmanager
def supervised(run: RunDir) -> Iterator[None]:
    # Orphans of a killed raylet come to us and not to init, so they are still found below.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    done, seen = threading.Event(), set[Process]()
    recorder = threading.Thread(target=_record, args=(run, done, seen), name="recorder", daemon=True)
    recorder.start()
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # what they would ask for is being done
        done.set()
        recorder.join()
        _end(seen)


def _record(run: RunDir, done: threading.Event, seen: set[Process]) -> None:
    while not done.wait(RECORD_EVERY_S):
        seen |= set(processes.descendants([os.getpid()]))
        seen -= {process for process in seen if not processes.alive(process)}
        run.record(sorted(seen, key=lambda process: process.pid))


def _end(seen: set[Process]) -> None:
    processes.end(seen)
    for _ in range(ROUNDS):
        if not (left := processes.descendants([os.getpid()])):
            return
        processes.end(left)

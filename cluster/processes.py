"""Processes of this machine, named so that a reused pid is never taken for the process that had it before."""

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Process:
    """A pid together with its start time in clock ticks since boot: the pair is never used twice."""

    pid: int
    started: int


def _stat(pid: int) -> tuple[str, int, int] | None:
    """(state, parent, start time) of a pid; None where there is none. /proc/PID/stat, see proc(5)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name may hold spaces and parentheses
    return fields[0], int(fields[1]), int(fields[19])


def find(pid: int) -> Process | None:
    """The living process of this pid (a zombie is dead)."""
    stat = _stat(pid)
    return None if stat is None or stat[0] in "ZX" else Process(pid, stat[2])


def alive(process: Process) -> bool:
    return find(process.pid) == process


def descendants(roots: Iterable[int]) -> list[Process]:
    """All living processes below the given pids, parents first, the roots themselves left out."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := _stat(int(entry))):
            children.setdefault(stat[1], []).append(int(entry))
    found, queue = [], list(roots)
    while queue:
        below = children.get(queue.pop(0), [])
        found += [process for pid in below if (process := find(pid))]
        queue += below
    return found


def send(processes: Iterable[Process], number: signal.Signals) -> None:
    """Sends a signal to those that are still the same process."""
    for process in processes:
        if alive(process):
            try:
                os.kill(process.pid, number)
            except ProcessLookupError:
                continue


def wait_gone(processes: Iterable[Process], wait_s: float) -> list[Process]:
    """Those that still live after at most `wait_s`."""
    left, until = list(processes), time.monotonic() + wait_s
    while (left := [process for process in left if alive(process)]) and time.monotonic() < until:
        time.sleep(0.02)
    return left


def end(processes: Iterable[Process], wait_s: float = 2.0) -> list[Process]:
    """Kills them all and their descendants; returns those that did not die in time."""
    listed = list(processes)
    listed += descendants(process.pid for process in listed if alive(process))
    send(listed, signal.SIGKILL)
    return wait_gone(listed, wait_s)

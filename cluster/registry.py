"""The workers of one cluster as their beats show them. No I/O, no clock: `now` is passed in.

              beats                  no beat for 2 s           no beat for 5 s, or no step for 5 s
(unknown) ------------> live <---------------------> silent ------------------------------> gone
                         \\____ barred: takes no new job until it beats again (a call to it failed), or
                                    at all (its canary failed)
"""

from dataclasses import dataclass, field
from typing import Literal

from forebay.cluster.beat import Beat, Kind

SILENT_S = 2.0
GONE_S = 5.0
MISROUTED_S = 1.0
"""How long a worker that Serve does not reach (not yet, or no more) takes no new job."""

State = Literal["live", "busy", "barred", "silent"]


@dataclass(slots=True)
class Entry:
    """One worker. `jobs` are those that this ingress has on it; `full` until it beats again or a job ends there."""

    beat: Beat
    beat_at: float
    beats: int = 1
    barred_until: float = 0.0
    full: bool = False
    jobs: set[str] = field(default_factory=set)

    @property
    def free_slots(self) -> int:
        return 0 if self.full else self.beat.pulse.stats.slots - len(self.jobs)


class Registry:
    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._dead: dict[Kind, int] = {"prefill": 0, "decode": 0}
        self.restarts: dict[Kind, int] = {"prefill": 0, "decode": 0}

    def __getitem__(self, worker: str) -> Entry:
        return self._entries[worker]

    def __contains__(self, worker: str) -> bool:
        return worker in self._entries

    @property
    def all(self) -> dict[str, Entry]:
        return self._entries

    def beat(self, beat: Beat, now: float) -> None:
        """A worker that was taken for gone and beats on is taken back: its jobs were moved, it is as good as new."""
        if beat.stalled_s >= GONE_S:
            return
        entry = self._entries.get(beat.worker)
        if entry is None:
            self._entries[beat.worker] = Entry(beat, now)
            self._count_restart(beat.kind)
            return
        entry.beat, entry.beat_at, entry.beats, entry.full = beat, now, entry.beats + 1, False
        if entry.barred_until == float("inf"):
            entry.barred_until = 0.0

    def live(self, kind: Kind, now: float) -> dict[str, Entry]:
        """Those that may take a job now."""
        return {name: entry for name, entry in self._entries.items() if entry.beat.kind == kind and _open(entry, now)}

    def alive(self, kind: Kind, now: float) -> bool:
        """Is there one that beats, whether or not it may take a job now?"""
        entries = self._entries.values()
        return any(entry.beat.kind == kind and now - entry.beat_at < SILENT_S for entry in entries)

    def state(self, worker: str, now: float) -> State:
        entry = self._entries[worker]
        if now - entry.beat_at >= SILENT_S:
            return "silent"
        if not _open(entry, now):
            return "barred"
        return "busy" if entry.beat.pulse.busy else "live"

    def assign(self, worker: str, job_id: str) -> None:
        """The job counts as load there until `unassign`."""
        if worker in self._entries:
            self._entries[worker].jobs.add(job_id)

    def unassign(self, worker: str, job_id: str) -> None:
        if worker in self._entries:
            self._entries[worker].jobs.discard(job_id)

    def suspect(self, worker: str) -> None:
        """A call to it failed: it takes no job until it has beaten again, which the dead do not."""
        if worker in self._entries:
            self._entries[worker].barred_until = float("inf")

    def misrouted(self, worker: str, now: float) -> None:
        """Serve does not reach it: it is new, or it drains."""
        if worker in self._entries:
            self._entries[worker].barred_until = now + MISROUTED_S

    def bury(self, now: float) -> list[tuple[str, Literal["silent", "hangs"]]]:
        """Removes the workers that are gone; returns each with the reason. Called a few times a second."""
        gone = [(name, reason) for name, entry in self._entries.items() if (reason := _gone(entry, now))]
        for name, _ in gone:
            self.remove(name)
        return gone

    def remove(self, worker: str) -> None:
        """It is known to be dead."""
        if entry := self._entries.pop(worker, None):
            self._dead[entry.beat.kind] += 1

    def _count_restart(self, kind: Kind) -> None:
        if self._dead[kind] > 0:
            self._dead[kind] -= 1
            self.restarts[kind] += 1


def _open(entry: Entry, now: float) -> bool:
    """A worker whose canary failed takes nothing any more: Serve replaces it."""
    trusted = not entry.beat.pulse.stats.canary_failed
    return trusted and now - entry.beat_at < SILENT_S and entry.barred_until <= now


def _gone(entry: Entry, now: float) -> Literal["silent", "hangs"] | None:
    silent_s = now - entry.beat_at
    if silent_s >= GONE_S:
        return "silent"
    # What it said last grows older while it says nothing.
    if entry.beat.pulse.busy and entry.beat.stalled_s + silent_s >= GONE_S:
        return "hangs"
    return None

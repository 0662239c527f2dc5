"""How soon what was used is used again, learned from what was seen so far: the eviction's view of the future.

A stay is the time from one use of some blocks to the next. Stays of one kind are told apart by their age only, in
buckets three to a doubling: of all blocks that reached a bucket, which share was used again within it (an estimate by
Kaplan and Meier, 1958, so stays that have not ended yet count for what is known of them). From it follows the hit
density: uses expected per second of holding on, for as long as holding on pays best

    density(kind, age) = max over t > age of  P(used again in (age, t]) / E[time held from age to the use, or to t]

(Beckmann, Chen, Cidon: LHD, NSDI 2018, with the horizon chosen as in an index of Gittins). What a use brings is the
same wherever it comes from, so the blocks of least density times seconds saved per byte go first.

Where little was seen, a bucket is taken to be like the one before it and a kind like all kinds: density then falls as
1 / age, which is LRU. Time is any clock that grows: seconds, or a count of requests.

Tried on 30 November 2026, recorded Claude Code sessions in 32 and 64 closed lanes, 3.25 M tokens, token hit rates (LRU
.373 and .176, optimal .717 and .596; four fifths of the way are .647 and .510).

All tokens weighing the same: one kind for all stays .521 and .342. Apart by how the turn stopped: .588 and .372. By
stop and the session's mean gap: .646 and .453; by the mean gap after such a stop: .652 and .461, and no better with the
last gap, the share of long gaps, the turn's number or the prompt's length beside it, with finer or coarser buckets, or
with tables learned on the same load before (.463). By the number of uses too, which chats need: .654 and .460. Weaker
belief (LIKE_*) gains nothing there, and with hardly any a chat trace falls from LRU's .589 to .563.

A token worth the seconds of its prefill, attention to all before it included, as the store counts: .639 and .448 by the
last block's seconds, which keeps long prompts for the sake of a tail that is cut first; .648 and .456 by the mean from
the root on, and more seconds saved, too (.628 of all for .623, .444 for .440). That is how it stands for sessions;
where none is known, blocks go by their own seconds (by the mean, one point of the chat traces falls below LRU).

What gaps cannot tell is the rest. A regression of each bucket's share on twenty such features (the last gaps, their
spread, the prompt's growth, turns since an answer) adds .002 and .007 while it learns; learned beforehand on the other
sessions of the load it gets .471 at 64 lanes, boosted trees .472 (.666 at 32). Told the answer's length as well .494,
and the recorded time of the call .499: four fifths there take knowledge of the future. Belady's order with gaps that
are off by a factor of two either way, and the ends of sessions known, gets .664 and .522.
"""

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

DOUBLINGS, PER_DOUBLING = 15, 3
EDGES: Floats = np.array([0.0, *(2 ** (k / PER_DOUBLING) for k in range(DOUBLINGS * PER_DOUBLING + 1))])
BUCKETS = len(EDGES)
_LEAVE_AT: list[float] = EDGES[1:].tolist()
_WIDTHS = np.diff(EDGES, append=2 * EDGES[-1])
FIRST_SHARE = 0.1
"""What share is taken to be used again within a bucket before anything was seen."""
LIKE_BEFORE, LIKE_ALL = 50, 50
"""How many stays' worth of belief a bucket has in the one before it, and a kind's bucket in all kinds'."""
REFRESH = 64
"""Densities are computed anew after so many new stays."""


@dataclass(slots=True, eq=False)
class Stay:
    """Blocks last used together: how many of them were not used again yet."""

    kind: int
    since: float
    blocks: int


class Reuse:
    """Learns from stays; answers with densities. One thread, calls in the order of time."""

    def __init__(self, kinds: int) -> None:
        self.kinds = kinds
        self._returned = np.zeros((kinds, BUCKETS))
        self._outlived = np.zeros((kinds, BUCKETS))
        self._open: list[deque[Stay]] = [deque() for _ in range(BUCKETS)]
        self._stays = 0
        self._blocks = 0
        self._computed_at = -REFRESH
        self._density: Floats = np.empty((kinds, BUCKETS))

    def advance(self, now: float) -> None:
        """Time has come to `now`: stays that outlived a bucket are counted in it."""
        for bucket, (stays, edge) in enumerate(zip(self._open, _LEAVE_AT, strict=False)):
            while stays and stays[0].since + edge <= now:
                stay = stays.popleft()
                if stay.blocks:
                    self._outlived[stay.kind, bucket] += stay.blocks
                    self._open[bucket + 1].append(stay)

    def begin(self, kind: int, now: float, blocks: int) -> Stay:
        """Some blocks were used just now."""
        stay = Stay(kind, now, blocks)
        self._open[0].append(stay)
        self._stays += 1
        self._blocks += blocks
        return stay

    def end(self, stay: Stay, now: float, blocks: int) -> None:
        """So many blocks of a stay are used again; the others stay on."""
        assert 0 < blocks <= stay.blocks
        self._returned[stay.kind, bucket_of(now - stay.since)] += blocks
        stay.blocks -= blocks

    def forget(self, stay: Stay, blocks: int | None = None) -> None:
        """It will not be seen whether so many of these blocks, or all, are used again: what is known stays counted."""
        stay.blocks -= stay.blocks if blocks is None else blocks

    def density(self, kind: int, age: float) -> float:
        """Uses expected per unit of time, by holding on to blocks last used `age` ago."""
        return float(self.densities(np.array([kind]), np.array([age]))[0])

    def densities(self, kinds: Ints, ages: Floats) -> Floats:
        """The same for many."""
        if self._stays - self._computed_at >= REFRESH:
            self._density, self._computed_at = self._densities(), self._stays
        return self._density[kinds, np.searchsorted(EDGES, ages, "right") - 1]

    def _densities(self) -> Floats:
        share = self._shares()
        alive = np.cumprod(np.hstack([np.ones((self.kinds, 1)), 1 - share]), axis=1)
        held = np.cumsum(alive[:, :-1] * (1 - share / 2) * _WIDTHS, axis=1)
        held = np.hstack([np.zeros((self.kinds, 1)), held])
        used = 1 - alive
        later = np.triu(np.ones((BUCKETS, BUCKETS), bool))
        time = held[:, None, 1:] - held[:, :-1, None]
        chords = (used[:, None, 1:] - used[:, :-1, None]) / np.where(later, np.maximum(time, 1e-300), 1.0)
        density: Floats = np.where(later, chords, 0.0).max(axis=2)
        return density

    def _shares(self) -> Floats:
        """[kinds, buckets]: the share used again within a bucket, of those that reached it."""
        unit = max(1.0, self._blocks / max(1, self._stays))
        ended, reached = self._returned.sum(axis=0), (self._returned + self._outlived).sum(axis=0)
        share = np.empty((self.kinds, BUCKETS))
        before, ratio = FIRST_SHARE, np.ones(self.kinds)
        for bucket in range(BUCKETS):
            before = (ended[bucket] + LIKE_BEFORE * unit * before) / (reached[bucket] + LIKE_BEFORE * unit)
            belief = np.minimum(before * ratio, 0.95)
            seen = self._returned[:, bucket] + self._outlived[:, bucket]
            share[:, bucket] = (self._returned[:, bucket] + LIKE_ALL * unit * belief) / (seen + LIKE_ALL * unit)
            ratio = share[:, bucket] / before
        return share


def bucket_of(age: float) -> int:
    return int(np.searchsorted(EDGES, age, "right")) - 1


STOPS = ("tool_use", "end_turn", "")
FIRST_GAP = {"tool_use": 4.3, "end_turn": 5.5, "": 5.5}
GAP_LEVELS, GAP_FIRST, GAP_STEP, GAP_MEMORY = 7, 3.0, 0.4, 4
USE_LEVELS = 4
KINDS = len(STOPS) * GAP_LEVELS * USE_LEVELS


def kind_of(stop: str, gap_log2: float, uses: int) -> int:
    """The kind of a stay that begins: how the turn stopped (tool_use, end_turn, "" unknown), the usual log2 of the
    session's gaps after such a stop, and how often the blocks were used, this time included."""
    stop = stop if stop in STOPS else ""
    level = min(max(int((gap_log2 - GAP_FIRST) / GAP_STEP), 0), GAP_LEVELS - 1)
    return (STOPS.index(stop) * GAP_LEVELS + level) * USE_LEVELS + min(uses, USE_LEVELS) - 1


def state_kind(kind: int, passed: bool) -> int:
    """The kind of a checkpoint's stay, of 2 * KINDS: what its blocks' is, and whether its turn had a later one too."""
    return 2 * kind + passed


class Gaps:
    """Each session's gaps from turn to turn: a moving mean of their log2, apart by how the turn before had stopped."""

    def __init__(self, sessions_max: int = 1 << 16) -> None:
        self._max = sessions_max
        self._sessions: dict[str, _Pace] = {}

    def usual(self, session: str | None, stop: str, now: float) -> float:
        """A turn of the session runs now and will stop so. The usual log2 of the gap after it."""
        stop = stop if stop in STOPS else ""
        if session is None:
            return FIRST_GAP[stop]
        pace = self._sessions.pop(session, None) or _Pace()
        pace.turn(stop, now)
        self._sessions[session] = pace
        if len(self._sessions) > self._max:
            del self._sessions[next(iter(self._sessions))]
        return pace.mean(stop)

    def stopped(self, session: str, stop: str) -> float:
        """How the session's latest turn stopped, if that was not known when it ran. The usual log2 of the gap after
        it."""
        stop = stop if stop in STOPS else ""
        pace = self._sessions.get(session)
        if pace is None:
            return FIRST_GAP[stop]
        pace.stopped(stop)
        return pace.mean(stop)


class _Pace:
    """One session's."""

    __slots__ = ("_after", "_last", "_stop")

    def __init__(self) -> None:
        self._after: dict[str, tuple[float, int]] = {}
        self._last: float | None = None
        self._stop = ""

    def turn(self, stop: str, now: float) -> None:
        if self._last is not None:
            mean, seen = self._after.get(self._stop, (FIRST_GAP[self._stop], 0))
            gap = math.log2(max(now - self._last, 1.0))
            self._after[self._stop] = mean + (gap - mean) / min(seen + 2, GAP_MEMORY), seen + 1
        self._last, self._stop = now, stop

    def stopped(self, stop: str) -> None:
        self._stop = stop

    def mean(self, stop: str) -> float:
        return self._after.get(stop, (FIRST_GAP[stop], 0))[0]

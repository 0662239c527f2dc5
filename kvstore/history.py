"""What the running store has seen of its blocks' uses: the eviction's view of the future, learned (reuse.py).

Every block that was used lately has a part in a stay, whether it is still in any tier or not: what was evicted and is
wanted again is learned of too. Checkpoints have stays of their own, which begin when one is kept or restored.

How a turn stopped tells most of when the session comes back, and is not known while it runs: its stays begin as those
of a turn of unknown end, and become what they are when `ended` is called. On the recorded sessions of reuse.py (token
hit rates in 32 and 64 lanes): .639 and .448 with the end known, .576 and .413 without, .564 and .408 with the end of
the turn before in its place.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forebay.kvstore.index import Checkpoint, Span, Unit
from forebay.kvstore.policy import recency
from forebay.kvstore.reuse import FIRST_GAP, KINDS, USE_LEVELS, Floats, Gaps, Reuse, Stay, kind_of, state_kind
from forebay.kvstore.turn import Stop, Turn

SESSIONS_MAX = 1 << 16
UNKNOWN = kind_of("", FIRST_GAP[""], 1)


@dataclass(slots=True, eq=False)
class _Part:
    """Blocks that one turn used, all for the `uses`-th time; or a checkpoint, `passed` by a later one of that turn."""

    stay: Stay
    uses: int
    session: str
    """Which session alone has used it, "" where several have, or nobody known."""

    passed: bool | None = None


class History:
    """`now`: of the latest turn, None before the first; until then a density is one of age in requests alone.

    Of blocks and of checkpoints the latest `keys_max` are remembered; of the others nothing is known but that they
    were not used since.
    """

    def __init__(self, keys_max: int) -> None:
        self.now: float | None = None
        self._keys_max = keys_max
        self._rows, self._states = Reuse(KINDS), Reuse(2 * KINDS)
        self._gaps = Gaps(SESSIONS_MAX)
        self._began = 0.0
        self._row_parts: dict[bytes, _Part] = {}
        self._state_parts: dict[bytes, _Part] = {}
        self._latest: OrderedDict[str, list[_Part]] = OrderedDict()
        self._over: OrderedDict[str, None] = OrderedDict()

    def advance(self, now: float) -> None:
        """A turn begins: time has come to `now`."""
        if self.now is None:
            self._began = self.now = now
        self.now = max(self.now, now)
        self._rows.advance(self.now)
        self._states.advance(self.now)

    def use(self, turn: Turn, keys: Sequence[bytes]) -> None:
        """The turn uses these blocks, found or to be computed: all those of its prompt."""
        self.advance(turn.now)
        assert self.now is not None
        if turn.stop:
            self.ended(turn.session, turn.stop)
        gap = self._gaps.usual(turn.session or None, "", self.now)
        self._over.pop(turn.session, None)
        by_uses: dict[tuple[int, str], list[bytes]] = {}
        left: Counter[Stay] = Counter()
        for key in keys:
            before = self._row_parts.pop(key, None)
            if before is not None:
                left[before.stay] += 1
            uses = min(before.uses + 1, USE_LEVELS) if before else 1
            alone = before is None or before.session == turn.session
            by_uses.setdefault((uses, turn.session if alone else ""), []).append(key)
        for stay, blocks in left.items():
            self._rows.end(stay, self.now, blocks)
        parts = []
        for (uses, session), used in by_uses.items():
            part = _Part(self._rows.begin(kind_of("", gap, uses), self.now, len(used)), uses, session)
            self._row_parts.update(dict.fromkeys(used, part))
            parts.append(part)
        self._forget_oldest(self._row_parts)
        self._note(turn.session, parts)

    def use_state(self, turn: Turn, key: bytes, *, passed: bool) -> None:
        """The turn, whose blocks were noted before, restored or kept a checkpoint. `passed`: and a later one too."""
        rows = self._row_parts.get(key)
        if self.now is None or rows is None:
            return
        self.forget_state(key, used=True)
        stay = self._states.begin(state_kind(rows.stay.kind, passed), self.now, 1)
        self._state_parts[key] = part = _Part(stay, rows.uses, rows.session, passed)
        self._forget_oldest(self._state_parts)
        if turn.session in self._latest:
            self._latest[turn.session].append(part)

    def forget_state(self, key: bytes, *, used: bool = False) -> None:
        """The checkpoint is in no tier any more, or is `used` now."""
        part = self._state_parts.pop(key, None)
        if part is not None and used and self.now is not None:
            self._states.end(part.stay, self.now, 1)
        elif part is not None:
            self._states.forget(part.stay)

    def ended(self, session: str, stop: Stop) -> None:
        """The session's latest turn ended so."""
        gap = self._gaps.stopped(session, stop)
        for part in self._latest.pop(session, ()):
            kind = kind_of(stop, gap, part.uses)
            part.stay.kind = kind if part.passed is None else state_kind(kind, part.passed)

    def end_session(self, session: str) -> None:
        """No turn of it comes any more: of what it alone has used nothing is expected, until one comes after all."""
        if not session:
            return
        self._over[session] = None
        self._over.move_to_end(session)
        if len(self._over) > SESSIONS_MAX:
            self._over.popitem(last=False)

    def is_over(self, unit: Unit) -> bool:
        """Has only a session used it that has ended?"""
        part = None
        if isinstance(unit, Span) and unit.keys:
            part = self._row_parts.get(unit.keys[-1])
        elif isinstance(unit, Checkpoint):
            part = self._state_parts.get(unit.key) or self._row_parts.get(unit.key)
        return part is not None and part.session in self._over

    def densities(self, units: Sequence[Unit], tick: int) -> Floats:
        """Uses expected per unit of time by holding on to each of these spans and checkpoints."""
        if self.now is None:
            ages: Floats = np.array([tick - unit.tick for unit in units], np.float64)
            return recency(ages)
        spans = [unit.keys[-1] if isinstance(unit, Span) else None for unit in units]
        states = [unit.key if isinstance(unit, Checkpoint) else None for unit in units]
        found = self._of(self._rows, self._row_parts, spans, UNKNOWN)
        known = np.where(
            [isinstance(unit, Checkpoint) for unit in units],
            self._of(self._states, self._state_parts, states, state_kind(UNKNOWN, True)),
            found,
        )
        return np.where([self.is_over(unit) for unit in units], 0.0, known) if self._over else known

    def fresh(self, key: bytes, *, passed: bool | None) -> float:
        """The density of a block used now, or (`passed` given) of a checkpoint kept at its end now."""
        rows = self._row_parts.get(key)
        if self.now is None:
            return recency(0)
        kind = rows.stay.kind if rows is not None else UNKNOWN
        return self._rows.density(kind, 0.0) if passed is None else self._states.density(state_kind(kind, passed), 0.0)

    def _of(self, reuse: Reuse, parts: dict[bytes, _Part], keys: Sequence[bytes | None], unknown: int) -> Floats:
        stays = [None if key is None or (part := parts.get(key)) is None else part.stay for key in keys]
        kinds = np.array([unknown if stay is None else stay.kind for stay in stays], np.int64)
        since = np.array([self._began if stay is None else stay.since for stay in stays], np.float64)
        assert self.now is not None
        return reuse.densities(kinds, self.now - since)

    def _note(self, session: str, parts: list[_Part]) -> None:
        """These are of the session's latest turn."""
        if not session:
            return
        self._latest[session] = parts
        self._latest.move_to_end(session)
        if len(self._latest) > SESSIONS_MAX:
            self._latest.popitem(last=False)

    def _forget_oldest(self, parts: dict[bytes, _Part]) -> None:
        while len(parts) > self._keys_max:
            (self._rows if parts is self._row_parts else self._states).forget(parts.pop(next(iter(parts))).stay, 1)

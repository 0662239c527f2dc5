"""The cluster-wide tier as one worker sees it: which objects of the pool stand behind which pages of the tier.

A page of this tier is a number only: one row of an object. What the tier knows may be behind: what it takes for
present may be gone, which costs a read, and what others stored is asked for, prompt by prompt, in the background. It
looks after a few of the objects it knows of every now and then; where all of those are gone, after all.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from itertools import islice
from time import monotonic

import numpy as np
import numpy.typing as npt

from forebay.kvstore.chain import Chain
from forebay.kvstore.config import StoreConfig
from forebay.kvstore.layout import Layout
from forebay.kvstore.moves import Label, Move, Pages, Tier
from forebay.kvstore.opening import Target
from forebay.kvstore.pool_client import Client
from forebay.kvstore.pool_object import PoolObject, object_of
from forebay.kvstore.pool_restore import PoolRestore, Reading
from forebay.kvstore.pool_traffic import PoolTraffic

Bytes = npt.NDArray[np.uint8]
Adopt = Callable[[Tier, Label], Pages | None]
ASKS_MAX = 64
ASK_AGAIN_S = 1.0
LOOK_AFTER_S = 1.0
LOOK_AFTER_OBJECTS = 8
ANSWERS_KEPT = 1024


@dataclass(slots=True, kw_only=True, eq=False)
class _Held:
    unit: PoolObject
    pages: list[int]


@dataclass(slots=True, kw_only=True, eq=False)
class _Ask:
    """Of one prompt. `answer` None: it came, and was taken in."""

    asked_s: float
    answer: "Future[list[Label]] | None"


class PoolTier:
    """`save` and `restore` carry out moves; `take_lost` tells of pages whose bytes are not or no longer there."""

    tier: Tier = "pool"

    def __init__(self, connect: Callable[[], Client], layout: Layout, mark: bytes, config: StoreConfig) -> None:
        self.traffic = PoolTraffic(connect, layout, mark, config)
        self._layout, self._mark, self._config = layout, mark, config
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._at: dict[int, tuple[_Held, int]] = {}
        self._lost: list[int] = []
        self._asks: OrderedDict[bytes, _Ask] = OrderedDict()
        self._look: Future[list[str]] | None = None
        self._looked_at = 0
        self._looked_s = monotonic()

    def save(self, move: Move, rows: Callable[[], Bytes | None]) -> None:
        """Queue a unit's bytes, [pages, n_bytes], which are read only where there is room. None: they are wrong."""
        assert move.label is not None
        unit, pages = object_of(self._layout, self._mark, move.label), move.target_pages.tolist()
        if self.traffic.put(unit, rows):
            self._note(unit, pages)
        else:
            self._forget(pages)
            self._lost += pages

    def restore(self, target: Target, moves: Iterable[Move]) -> PoolRestore:
        readings = [reading for move in moves for reading in self._by_object(move)]
        return PoolRestore(self.traffic, target, readings, self._config.pool_read_s)

    def discover(self, chain: Chain, adopt: Adopt) -> None:
        """Ask what the pool has of this prompt, or take in what it answered."""
        if not chain.keys:
            return
        ask = self._asks.get(chain.keys[-1])
        if ask is None or (ask.answer is None and monotonic() - ask.asked_s > ASK_AGAIN_S):
            self._ask(chain)
        elif ask.answer is not None and ask.answer.done():
            labels = ask.answer.result()
            ask.answer = None
            for label in labels:
                if (pages := adopt("pool", label)) is not None:
                    self._note(object_of(self._layout, self._mark, label), pages.tolist())

    def waits_for(self, chain: Chain) -> bool:
        """Was the pool asked about this prompt, and may its answer still be waited for?"""
        ask = self._asks.get(chain.keys[-1]) if chain.keys else None
        if ask is None or ask.answer is None or ask.answer.done():
            return False
        return monotonic() - ask.asked_s < self._config.pool_ask_s

    def wait(self, timeout_s: float) -> None:
        """Until some answer came."""
        coming = [ask.answer for ask in self._asks.values() if ask.answer is not None and not ask.answer.done()]
        if coming:
            wait_for(coming, timeout_s, "FIRST_COMPLETED")

    def take_lost(self) -> list[int]:
        self._look_after()
        absent = self.traffic.take_absent()
        self._give_up(list(self._held) if absent is None else absent)
        lost, self._lost = self._lost, []
        return lost

    def close(self) -> None:
        self.traffic.close()

    def _ask(self, chain: Chain) -> None:
        pending = sum(ask.answer is not None for ask in self._asks.values())
        if pending < ASKS_MAX and self.traffic.is_joined:
            self._asks[chain.keys[-1]] = _Ask(asked_s=monotonic(), answer=self.traffic.ask(chain.keys))
            self._asks.move_to_end(chain.keys[-1])
            if len(self._asks) > ANSWERS_KEPT:
                self._asks.popitem(last=False)

    def _look_after(self) -> None:
        """Of the objects known for longest without a look; of all, where none of those is there any more."""
        if self._look is None:
            if self._held and monotonic() - self._looked_s > LOOK_AFTER_S:
                self._look_at(list(islice(self._held, LOOK_AFTER_OBJECTS)))
        elif self._look.done():
            missing = self._look.result()
            self._give_up(missing)
            self._look, self._looked_s = None, monotonic()
            if missing and len(missing) == self._looked_at and self._held:
                self._look_at(list(self._held))

    def _give_up(self, names: Iterable[str]) -> None:
        for name in names:
            if (held := self._held.get(name)) is not None:
                self._lost += held.pages
                self._forget(held.pages)

    def _look_at(self, names: list[str]) -> None:
        self._looked_at = len(names)
        self._look = self.traffic.ask_for(names)
        for name in names:
            self._held.move_to_end(name)

    def _note(self, unit: PoolObject, pages: list[int]) -> None:
        self._forget(pages)
        if (before := self._held.get(unit.name)) is not None:
            self._forget(before.pages)
        held = self._held[unit.name] = _Held(unit=unit, pages=pages)
        for row, page in enumerate(pages):
            self._at[page] = held, row

    def _forget(self, pages: Sequence[int]) -> None:
        """What was on these pages before; a unit's pages come and go together."""
        for page in pages:
            held, _ = self._at.pop(page, (None, 0))
            if held is not None and self._held.get(held.unit.name) is held:
                del self._held[held.unit.name]

    def _by_object(self, move: Move) -> list[Reading]:
        """The parts of a move up, one for each object; pages that are nowhere are one of their own."""
        parts: dict[str, list[int]] = defaultdict(list)
        places = [self._at.get(page) for page in move.source_pages.tolist()]
        for index, place in enumerate(places):
            parts[place[0].unit.name if place else ""].append(index)
        return [
            Reading(
                unit=None if (first := places[at[0]]) is None else first[0].unit,
                taken=[place[1] for index in at if (place := places[index]) is not None],
                source_pages=move.source_pages[at],
                target_pages=move.target_pages[at],
                n_bytes=move.n_bytes,
            )
            for at in parts.values()
        ]

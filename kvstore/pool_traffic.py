"""What goes to and from the cluster-wide pool: everything that may take time, in threads of its own.

    traffic.put(unit, rows) -> bool          queued, or skipped since the queue is full or nobody is there
    traffic.read(units) -> Future            each one's rows, verified, or why not
    traffic.ask(keys) -> Future              what the pool has of a prompt
    traffic.take_absent() -> names           what turned out not to be there; None: nothing can be relied on any more

Objects travel in batches, between registered memory and the pool. A queued object can be read from the queue.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from time import monotonic, sleep

import numpy as np
import numpy.typing as npt

from forebay.kvstore.config import StoreConfig
from forebay.kvstore.layout import Layout
from forebay.kvstore.moves import Label
from forebay.kvstore.pool_address import PoolError
from forebay.kvstore.pool_client import Client, Trouble
from forebay.kvstore.pool_fetch import TRY_AGAIN_S, Fetched, Fetcher
from forebay.kvstore.pool_find import find
from forebay.kvstore.pool_object import PoolObject, largest_bytes, object_of
from forebay.kvstore.pool_room import Lent, Room
from forebay.kvstore.totals import PoolEvent

Bytes = npt.NDArray[np.uint8]
BATCH_OBJECTS = 32
JOIN_EVERY_S = 1.0
AWAY_S = 1.0
"""How long nothing is sent to a master that did not answer."""

CLOSE_S = 3.0
_EVENTS: dict[Trouble, PoolEvent] = {"full": "full", "unreachable": "unreachable"}


@dataclass(slots=True, kw_only=True, eq=False)
class _Put:
    unit: PoolObject
    lent: Lent


class PoolTraffic:
    def __init__(self, connect: Callable[[], Client], layout: Layout, mark: bytes, config: StoreConfig) -> None:
        """`connect` may take seconds, and is tried again for as long as it raises PoolError."""
        self._events: Counter[PoolEvent] = Counter()
        self.failure: str | None = None
        self._layout, self._mark, self._config = layout, mark, config
        self._connect = connect
        room_bytes = max(config.pool_queue_bytes, 2 * largest_bytes(layout))
        self._memory = np.zeros(2 * room_bytes, dtype=np.uint8)
        self._out, self._in = Room(self._memory[:room_bytes]), Room(self._memory[room_bytes:])
        self._fetcher = Fetcher(self._in, config, self._tell)
        self._client: Client | None = None
        self._changed = threading.Condition(threading.RLock())
        self._queue: deque[_Put] = deque()
        self._waiting: dict[str, _Put] = {}
        self._absent: list[str] = []
        self._is_lost = False
        self._away_until_s = 0.0
        self.fetched_s = monotonic()
        self._closing = False
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="pool-read")
        self._asker = ThreadPoolExecutor(1, thread_name_prefix="pool-ask")
        self._writer = threading.Thread(target=self._write_on, name="pool-write", daemon=True)
        self._writer.start()

    @property
    def events(self) -> dict[PoolEvent, int]:
        with self._changed:
            return dict(self._events)

    @property
    def client(self) -> Client | None:
        """None until it has joined, and after its end."""
        return self._client

    @property
    def is_joined(self) -> bool:
        return self._client is not None

    @property
    def queued_bytes(self) -> int:
        return self._out.taken_bytes

    @property
    def batch_bytes(self) -> int:
        """What one read may ask for: two fit into the memory at a time."""
        return len(self._in.bytes) // 2

    def put(self, unit: PoolObject, rows: Callable[[], Bytes | None]) -> bool:
        """Copies `rows()`, [rows, row_bytes], if there is room; None: wrong ones. False: it will not be there."""
        lent = self._out.take(unit.total_bytes) if self.is_joined and monotonic() >= self._away_until_s else None
        if lent is None or (data := rows()) is None:
            self._tell("skipped" if lent is None else "failed")
            return False
        unit.fill(lent.bytes, data)
        put = _Put(unit=unit, lent=lent)
        with self._changed:
            self._queue.append(put)
            self._waiting[unit.name] = put
            self._changed.notify_all()
        return True

    def read(self, units: Sequence[PoolObject]) -> "Future[list[Fetched]]":
        """In order. At most `batch_bytes` together, or one alone."""
        with self._changed:
            waiting = {name: put for unit in units if (put := self._waiting.get(name := unit.name))}
        return self._reader.submit(self._read, list(units), waiting)

    def ask(self, keys: Sequence[bytes]) -> "Future[list[Label]]":
        """What the pool has that a prompt of these keys can be resumed from; [] where it cannot be asked."""
        return self._asker.submit(find, self._layout, keys, self._exist)

    def ask_for(self, names: Sequence[str]) -> "Future[list[str]]":
        """Which of these are not there any more; [] where it cannot be asked. What is on its way is not missing."""
        with self._changed:
            sent = [name for name in names if name not in self._waiting]
        return self._asker.submit(self._missing, sent)

    def take_absent(self) -> list[str] | None:
        with self._changed:
            absent, self._absent = self._absent, []
            is_lost, self._is_lost = self._is_lost, False
        return None if is_lost else absent

    def wait_joined(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.is_joined, timeout_s)

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing is queued."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def close(self) -> None:
        """Send what waits, if it goes quickly; leave the pool."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._writer.join(CLOSE_S)

    def _write_on(self) -> None:
        """In the writing thread, to the end."""
        client = self._join()
        while client is not None and self._write(client, self._next_batch()):
            pass
        with self._changed:
            self._client = None
        for threads in (self._asker, self._reader):  # a call that comes after the end would end the process
            threads.shutdown(cancel_futures=True)
        if client is not None:
            client.close()

    def _join(self) -> Client | None:
        """None: closed before anybody answered."""
        self._memory[:: 1 << 12] = 0  # the first touch takes longer than a copy
        while not self._closing:
            try:
                client = self._connect()
                client.register(self._memory)
            except PoolError as error:
                self.failure = str(error)
                self._tell("unreachable")
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, JOIN_EVERY_S)
                continue
            with self._changed:
                self._client, self.failure = client, None
                self._changed.notify_all()
            return client
        return None

    def _next_batch(self) -> list[_Put]:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._queue) or self._closing)
            batch = list(islice(self._queue, BATCH_OBJECTS))
            for _ in batch:
                self._queue.popleft()
            return batch

    def _write(self, client: Client, batch: list[_Put]) -> bool:
        """False where there was nothing more to write. What was lent to the batch is free when this ends."""
        if not batch:
            return False
        troubles = self._send(client, batch)
        full = [put for put, trouble in zip(batch, troubles, strict=True) if trouble == "full"]
        if full and not self._closing:  # the pool makes room only once it was asked in vain
            sleep(TRY_AGAIN_S)
            again = dict(zip(full, self._send(client, full), strict=True))
            troubles = [again.get(put, trouble) for put, trouble in zip(batch, troubles, strict=True)]
        with self._changed:
            for put, trouble in zip(batch, troubles, strict=True):
                if self._waiting.get(put.unit.name) is put:
                    del self._waiting[put.unit.name]
                if trouble is not None:
                    self._absent.append(put.unit.name)
                    self._tell(_EVENTS.get(trouble, "failed"))
            self._changed.notify_all()
        return True

    def _send(self, client: Client, batch: Sequence[_Put]) -> list[Trouble | None]:
        return client.put(
            [put.unit.name for put in batch],
            [put.lent.address for put in batch],
            [put.unit.total_bytes for put in batch],
        )

    def _exist(self, labels: Sequence[Label]) -> list[bool] | None:
        """In the asking thread."""
        client = self._client
        if client is None or not labels:
            return [False] * len(labels)
        there = client.exist([object_of(self._layout, self._mark, label).name for label in labels])
        if there is None:
            self._tell("unreachable")
        return there

    def _missing(self, names: list[str]) -> list[str]:
        if not names:
            return []
        client = self._client
        there = client.exist(names) if client is not None else None
        if there is None:
            self._tell("unreachable")
            return []
        return [name for name, is_there in zip(names, there, strict=True) if not is_there]

    def _tell(self, event: PoolEvent) -> None:
        """Count it. While the master is away nothing can be relied on, and what it knew may be gone."""
        with self._changed:
            self._events[event] += 1
            if event == "unreachable":
                self._is_lost, self._away_until_s = True, monotonic() + AWAY_S

    def _read(self, units: list[PoolObject], waiting: dict[str, _Put]) -> list[Fetched]:
        """In the reading thread. `waiting`: what is on its way there, and is taken from here."""
        wanted, client = [unit for unit in units if unit.name not in waiting], self._client
        if client is None:
            return [Fetched(rows=None, trouble="gone") for _ in units]
        fetched = {unit.name: each for unit, each in zip(wanted, self._fetcher.fetch(client, wanted), strict=True)}
        self.fetched_s = monotonic()
        for name, put in waiting.items():
            fetched[name] = Fetched(rows=put.unit.data_of(put.lent.bytes), lent=put.lent)
        return [fetched[unit.name] for unit in units]

"""The cluster-wide tier on a pool that fails in every way: what it finds is what is there, and never a wrong byte."""

import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from fake_pool import FakeClient, Objects, pool_of
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from forebay.kvstore import pool_fetch, pool_traffic
from forebay.kvstore.config import StoreConfig
from forebay.kvstore.lookup import STATES
from forebay.kvstore.memory import Memory, make_memory
from forebay.kvstore.moves import Label
from forebay.kvstore.pool_client import Trouble
from forebay.kvstore.pool_object import PoolObject, largest_bytes, object_of
from forebay.kvstore.pool_room import Room
from forebay.kvstore.pool_traffic import PoolTraffic
from forebay.kvstore.ssd import model_mark
from tests.kvstore_twin import BLOCK, serve, tiny_layout

LAYOUT = tiny_layout()
MARK = model_mark("twin")
SEEN: Counter[str] = Counter()


def fresh(folder: Path) -> Memory:
    config = StoreConfig(
        device_bytes=28 * LAYOUT.page_bytes,
        run_dir=str(folder),
        checkpoints="prompt_end",
        pool="mooncake://127.0.0.1:1",
        pool_queue_bytes=1 << 16,
        pool_ask_s=10.0,
    )
    memory = make_memory(LAYOUT, config, "twin")
    assert memory.pool_tier is not None
    assert memory.pool_tier.traffic.wait_joined(10)
    return memory


def settle(memory: Memory) -> None:
    assert memory.pool_tier is not None
    assert memory.pool_tier.traffic.flush(10)
    memory.settle()
    memory.store.check()


def resumable(memory: Memory, objects: Objects, ids: list[int]) -> int:
    """The tokens of a prompt that the pool's objects alone can restore: each end tried, each page asked for."""
    keys = memory.store.chain(ids).keys
    most = (len(ids) - 1) // BLOCK
    whole = {end * BLOCK for end in range(1, most + 1) if _has_all(objects, keys, end, len(keys))}
    return max(whole, default=0)


def _has_all(objects: Objects, keys: tuple[bytes, ...], end: int, known: int) -> bool:
    def there(group: str, first: int, last: int) -> bool:
        label = Label(
            group=group, keys=keys[first:last], before=None, start_tokens=first * BLOCK, end_tokens=last * BLOCK
        )
        unit = object_of(LAYOUT, MARK, label)
        image = objects.held.get(unit.name)
        return image is not None and unit.is_whole(np.frombuffer(image, np.uint8))

    if not there(STATES, end - 1, end):
        return False
    for group in LAYOUT.paged:
        per_page = group.page_tokens // BLOCK
        for first in range(0, end, per_page):
            full = first + per_page
            if not (full <= known and there(group.name, first, full)) and not there(group.name, first, min(full, end)):
                return False
    return True


LENGTHS = st.sampled_from([9, 22, 31, 40, 57])
OPS = st.one_of(
    *[st.tuples(st.just("serve"), st.integers(0, 1), st.integers(0, 1), LENGTHS)] * 16,
    *[st.tuples(st.just("drop"), st.integers(0, 99))] * 3,
    st.tuples(st.just("spoil"), st.integers(0, 99), st.integers(0, 2000)),
    st.tuples(st.sampled_from(["away", *["back"] * 4, "full", *["roomy"] * 4, "restart"])),
    st.tuples(st.just("anew"), st.integers(0, 1)),
)


def test_random_histories_find_what_is_there(
    tmp_path: Path, examples: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (pool_traffic, pool_fetch):
        monkeypatch.setattr(module, "TRY_AGAIN_S", 0.001)

    @settings(max_examples=examples(400), phases=[Phase.generate])  # a smaller history would be minutes away
    @given(st.lists(OPS, min_size=20, max_size=40), st.integers(0, 1), LENGTHS)
    def run(ops: list[tuple[int | str, ...]], first: int, length: int) -> None:
        objects = Objects()
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder, pool_of(objects), ExitStack() as stack:
            workers = [fresh(Path(folder)) for _ in range(2)]
            stack.callback(lambda: [memory.close() for memory in workers])
            for op in ops:
                _act(objects, workers, Path(folder), *op)
            objects.away = objects.full = False
            last = fresh(Path(folder))
            stack.callback(last.close)
            ids = [first, *range(length + 1)]
            expected = resumable(last, objects, ids)
            spoiled = not all(_is_whole(objects, name) for name in objects.held)
            found, _ = serve(last, ids)
            SEEN["pool hits"] += found > 0
            assert found == expected or (spoiled and found <= expected), "as much as the pool's objects restore"
            settle(last)

    run()
    assert min(SEEN[name] for name in ("pool hits", "corrupt", "unreachable", "full", "gone")) > 0, SEEN
    print(dict(SEEN))


def _is_whole(objects: Objects, name: str) -> bool:
    from forebay.kvstore.record import NoRecord, unpack

    image = np.frombuffer(objects.held[name], np.uint8)
    try:
        label = unpack(image.tobytes()).label
        unit = object_of(LAYOUT, MARK, label)
    except (NoRecord, StopIteration):
        return False
    return unit.name == name and unit.is_whole(image)


def _act(objects: Objects, workers: list[Memory], folder: Path, name: str, *args: int) -> None:
    match name:
        case "serve":
            memory = workers[args[0]]
            serve(memory, [args[1], *range(args[2])])
            settle(memory)
            SEEN.update(memory.store.stats().pool_events.keys())
        case "drop":
            objects.drop(args[0])
        case "spoil":
            objects.spoil(*args)
        case "anew":
            workers[args[0]].close()
            workers[args[0]] = fresh(folder)
        case "restart":
            objects.restart()
        case _:
            objects.away = {"away": True, "back": False}.get(name, objects.away)
            objects.full = {"full": True, "roomy": False}.get(name, objects.full)


def units() -> list[PoolObject]:
    keys = tuple(bytes([number]) * 32 for number in range(6))
    spans = [
        Label(group="latent", keys=keys[:3], before=None, start_tokens=0, end_tokens=12),
        Label(group="latent", keys=keys[:2], before=keys[5], start_tokens=12, end_tokens=20),
        Label(group="index", keys=keys, before=None, start_tokens=0, end_tokens=24),
        Label(group=STATES, keys=keys[:1], before=keys[1], start_tokens=4, end_tokens=8),
    ]
    return [object_of(LAYOUT, MARK, label) for label in spans]


@pytest.mark.parametrize("unit", units(), ids=lambda unit: unit.label.group)
def test_every_flipped_bit_and_every_other_name_is_seen(unit: PoolObject) -> None:
    image = np.random.default_rng(0).integers(0, 256, unit.total_bytes, dtype=np.uint8)
    assert not unit.is_whole(image)
    unit.fill(image, unit.data_of(image).copy())
    assert unit.is_whole(image)
    for other in units():
        assert other.name == unit.name or not other.is_whole(np.resize(image, other.total_bytes))
    for at in range(unit.total_bytes):
        image[at] ^= 1 << at % 8
        assert not unit.is_whole(image), at
        image[at] ^= 1 << at % 8
    assert unit.total_bytes <= largest_bytes(LAYOUT)
    assert len(unit.name) < 200
    assert len({each.name for each in units()}) == len(units())


def test_an_object_of_a_released_model_has_megabytes() -> None:
    """The figures of `pool_object`, from the shapes."""
    from forebay.kvstore.layout import make_layout

    layout = make_layout(
        block_tokens=512,
        global_layers=[layer for layer in range(93) if layer % 4 == 3] + [92],
        kda_layers=[layer for layer in range(92) if layer % 4 != 3],
        latent_row_bytes=1152,
        index_row_bytes=None,
        state_bytes=(6 << 20) + 221184,  # matrices and convolution tail
    )
    assert (len(layout.paged[0].layers), layout.state_pages) == (24, 69)
    keys = (bytes(32),) * (layout.paged[0].page_tokens // 512)
    span = Label(group="latent", keys=keys, before=None, start_tokens=0, end_tokens=layout.paged[0].page_tokens)
    assert object_of(layout, MARK, span).total_bytes >> 20 == 162
    states = Label(group=STATES, keys=keys[:1], before=None, start_tokens=0, end_tokens=512)
    assert object_of(layout, MARK, states).total_bytes >> 20 == 428


def test_what_is_lent_comes_back_when_it_is_dropped() -> None:
    room = Room(np.zeros(1024, dtype=np.uint8))
    first, second = room.take(500), room.take(500)
    assert first is not None
    assert second is not None
    assert room.take(10) is None, "each takes multiples of 64"
    assert room.take(100, 0.05) is None
    assert room.take(5000, 60) is None, "never"
    del first
    third = room.take(512)
    assert third is not None
    assert third.address == room.bytes.ctypes.data
    third.give_back()
    third.give_back()
    second.give_back()
    assert room.taken_bytes == 0


class _HeldUp(FakeClient):
    """What is put arrives once `open` is set."""

    def __init__(self, objects: Objects) -> None:
        super().__init__(objects)
        self.open = Event()

    def put(self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[Trouble | None]:
        assert self.open.wait(10)
        return super().put(names, addresses, sizes)


def test_what_is_on_its_way_to_the_pool_is_not_missing_there(tmp_path: Path) -> None:
    objects, unit = Objects(), units()[0]
    client = _HeldUp(objects)
    config = StoreConfig(
        device_bytes=LAYOUT.page_bytes,
        run_dir=str(tmp_path),
        pool="mooncake://127.0.0.1:1",
        pool_queue_bytes=1 << 16,
    )
    traffic = PoolTraffic(lambda: client, LAYOUT, MARK, config)
    try:
        assert traffic.wait_joined(10)
        assert traffic.put(unit, lambda: np.zeros((unit.rows, unit.row_bytes), dtype=np.uint8))
        assert traffic.ask_for([unit.name]).result(10) == []
        client.open.set()
        assert traffic.flush(10)
        assert traffic.ask_for([unit.name]).result(10) == []
        objects.restart()
        assert traffic.ask_for([unit.name]).result(10) == [unit.name]
    finally:
        client.open.set()
        traffic.close()

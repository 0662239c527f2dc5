"""Handoffs between two real processes: all of it, verified, or none of it."""

import pickle
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.kvstore.arena import Arena
from forebay.kvstore.config import StoreConfig
from forebay.kvstore.handoff import ArenaRefusal, Handoff, HandoffArea, HandoffError, adopt
from forebay.kvstore.layout import Layout
from forebay.kvstore.memory import Memory, make_memory
from forebay.kvstore.store import Lease
from tests.kvstore_twin import Owner, compute, tiny_layout, verify

IDS = tuple(range(31))
OWNER = Owner()


def memory_of(layout: Layout) -> Memory:
    return make_memory(layout, StoreConfig(device_bytes=64 * layout.page_bytes, run_dir="unused"), "twin")


def leased(memory: Memory, n_tokens: int = len(IDS)) -> Lease:
    lease = memory.open(OWNER, None, n_prompt=n_tokens, capacity_tokens=n_tokens)
    assert isinstance(lease, Lease)
    return lease


@pytest.fixture
def exported(tmp_path: Path) -> Iterator[tuple[Arena, HandoffArea, Handoff]]:
    memory = memory_of(tiny_layout())
    with Arena(tmp_path, "handoff", 8192) as arena:
        area = HandoffArea(arena, memory.pool, "twin")
        with leased(memory) as lease:
            compute(memory, lease, IDS, 0, len(IDS))
            handoff = area.export(lease, len(IDS))
        assert isinstance(handoff, Handoff)
        yield arena, area, handoff


def test_what_is_adopted_is_what_was_computed(exported: tuple[Arena, HandoffArea, Handoff]) -> None:
    _, area, handoff = exported
    memory = memory_of(tiny_layout())
    lease = leased(memory)
    adopt(pickle.loads(pickle.dumps(handoff)), memory.pool, lease, "twin")
    verify(memory, lease, IDS, len(IDS))
    adopt(handoff, memory.pool, leased(memory, 40), "twin")
    assert len(area) == 1
    assert len(handoff.pieces) == 2 + 2 + 4, "one piece a layer, whatever the length"


@pytest.mark.parametrize("page_tokens", [24, 48])
def test_page_sizes_may_differ(exported: tuple[Arena, HandoffArea, Handoff], page_tokens: int) -> None:
    layout = tiny_layout()
    latent, index = layout.paged
    other = replace(
        layout,
        page_bytes=page_tokens * 8,
        paged=(replace(latent, page_tokens=page_tokens), replace(index, page_tokens=2 * page_tokens)),
    )
    memory = memory_of(other)
    lease = leased(memory)
    adopt(exported[2], memory.pool, lease, "twin")
    verify(memory, lease, IDS, len(IDS))


def test_every_flipped_byte_is_caught_and_nothing_is_adopted(exported: tuple[Arena, HandoffArea, Handoff]) -> None:
    arena, _, handoff = exported
    memory = memory_of(tiny_layout())
    lease = leased(memory)
    before = memory.pool.bytes.clone()
    for piece in handoff.pieces:
        for at in range(piece.offset, piece.offset + piece.n_bytes):
            arena.bytes[at] ^= 1 << at % 8
            with pytest.raises(HandoffError, match=f"{piece.group} of layer {piece.layer}"):
                adopt(handoff, memory.pool, lease, "twin")
            arena.bytes[at] ^= 1 << at % 8
    assert memory.pool.bytes.equal(before)
    adopt(handoff, memory.pool, lease, "twin")


def test_every_truncation_is_caught(exported: tuple[Arena, HandoffArea, Handoff], tmp_path: Path) -> None:
    arena, _, handoff = exported
    memory = memory_of(tiny_layout())
    lease = leased(memory)
    last = handoff.pieces[-1]
    copy = tmp_path / "copy"
    whole = arena.bytes[: last.offset + last.n_bytes].tobytes()
    for size in range(len(whole)):
        copy.write_bytes(whole[:size])
        with pytest.raises(HandoffError):
            adopt(replace(handoff, path=str(copy)), memory.pool, lease, "twin")
    copy.write_bytes(whole)
    adopt(replace(handoff, path=str(copy)), memory.pool, lease, "twin")


def test_what_does_not_fit_is_refused(exported: tuple[Arena, HandoffArea, Handoff]) -> None:
    handoff = exported[2]
    memory = memory_of(tiny_layout())
    lease = leased(memory)
    wrong = {
        "another model": (replace(handoff, fingerprint="other"), memory, lease),
        "the lease holds": (handoff, memory, leased(memory, 30)),
        "not those of this model": (replace(handoff, pieces=handoff.pieces[:-1]), memory, lease),
        "is gone": (replace(handoff, path="/nowhere"), memory, lease),
    }
    for said, (bad, into, pages) in wrong.items():
        with pytest.raises(HandoffError, match=said):
            adopt(bad, into.pool, pages, "twin")
    larger_states = memory_of(tiny_layout(state_bytes=94))
    with pytest.raises(HandoffError, match="not those of this model"):
        adopt(handoff, larger_states.pool, leased(larger_states), "twin")


def test_the_arena_is_bounded_and_given_back(tmp_path: Path) -> None:
    memory = memory_of(tiny_layout())
    with Arena(tmp_path, "handoff", 2560) as arena, leased(memory) as lease, leased(memory, 150) as long:
        area = HandoffArea(arena, memory.pool, "twin")
        first, second, refused = (area.export(lease, len(IDS)) for _ in range(3))
        assert isinstance(first, Handoff)
        assert isinstance(second, Handoff)
        assert isinstance(refused, ArenaRefusal)
        assert refused.kind == "full"
        assert refused.available_bytes < refused.needed_bytes
        area.release(first.id)
        area.release(first.id)
        again = area.export(lease, len(IDS))
        assert isinstance(again, Handoff)
        assert len({first.id, second.id, again.id}) == 3
        arena.extents.check()
        assert area.release_holder(Owner("ingress", 0)) == 0
        assert area.release_holder(OWNER) == 2
        assert (len(area), area.free_bytes) == (0, area.total_bytes)
        too_large = area.export(long, 150)
        assert isinstance(too_large, ArenaRefusal)
        assert too_large.kind == "too_large"


def test_a_released_handoff_is_not_adopted_once_overwritten(exported: tuple[Arena, HandoffArea, Handoff]) -> None:
    _, area, handoff = exported
    memory = memory_of(tiny_layout())
    area.release(handoff.id)
    other = [7] * len(IDS)
    source = memory_of(tiny_layout())
    area._pool = source.pool
    with leased(source) as lease:
        compute(source, lease, other, 0, len(IDS))
        assert isinstance(area.export(lease, len(IDS)), Handoff)
    with pytest.raises(HandoffError, match="checksum"):
        adopt(handoff, memory.pool, leased(memory), "twin")


def test_from_one_process_to_another_that_outlives_it(tmp_path: Path) -> None:
    """The exporter is killed after its export: what it left can still be adopted."""
    code = f"""
        import os, pickle, sys
        sys.path.insert(0, {str(Path(__file__).resolve().parents[1])!r})
        from forebay.kvstore.arena import Arena
        from forebay.kvstore.handoff import HandoffArea
        from tests.kvstore_twin import compute, tiny_layout
        from tests.test_kvstore_handoff import IDS, leased, memory_of
        memory = memory_of(tiny_layout())
        arena = Arena({str(tmp_path)!r}, "handoff", 8192)
        lease = leased(memory)
        compute(memory, lease, IDS, 0, len(IDS))
        handoff = HandoffArea(arena, memory.pool, "twin").export(lease, len(IDS))
        sys.stdout.buffer.write(pickle.dumps(handoff))
        sys.stdout.flush()
        os.kill(os.getpid(), 9)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, check=False)
    assert done.returncode == -9
    memory = memory_of(tiny_layout())
    lease = leased(memory)
    adopt(pickle.loads(done.stdout), memory.pool, lease, "twin")
    verify(memory, lease, IDS, len(IDS))

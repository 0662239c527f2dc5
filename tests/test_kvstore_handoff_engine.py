"""Handoffs by Mooncake's Transfer Engine, between two real processes: all of it, verified, or none of it."""

import os
import pickle
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hash_model import HashModel, answer, config_of, job_of
from mooncake_rig import needs_mooncake

from forebay.kvstore import handoff_engine
from forebay.kvstore.handoff import Handoff, HandoffError, Peer, adopt
from forebay.kvstore.handoff_engine import Engine
from forebay.workers.local import LocalPair
from tests.kvstore_twin import tiny_layout, verify
from tests.test_kvstore_handoff import IDS, leased, memory_of

needs_mooncake()

EXPORTER = """
    import pickle, sys
    from forebay.kvstore.arena import Arena
    from forebay.kvstore.handoff import HandoffArea
    from forebay.kvstore.handoff_engine import Engine
    from tests.kvstore_twin import compute, tiny_layout
    from tests.test_kvstore_handoff import IDS, leased, memory_of
    memory, engine = memory_of(tiny_layout()), Engine("127.0.0.1", "tcp", "")
    with Arena(sys.argv[1], "handoff", 8192) as arena:
        lease = leased(memory)
        compute(memory, lease, IDS, 0, len(IDS))
        handoff = HandoffArea(arena, memory.pool, "twin", engine.offer(arena)).export(lease, len(IDS))
        print(pickle.dumps(handoff).hex(), flush=True)
        for line in sys.stdin:  # a byte to flip
            arena.bytes[int(line)] ^= 1
            print("flipped", flush=True)
"""


@contextmanager
def exporter(folder: Path) -> Iterator[tuple["subprocess.Popen[str]", Handoff]]:
    paths = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parents[1]), *sys.path])}
    command = [sys.executable, "-c", textwrap.dedent(EXPORTER), str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=os.environ | paths) as process:
        try:
            assert process.stdout is not None
            yield process, pickle.loads(bytes.fromhex(process.stdout.readline()))
        finally:
            process.kill()


def flip(process: "subprocess.Popen[str]", at: int) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{at}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "flipped\n"


def test_all_of_it_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, engine = memory_of(tiny_layout()), Engine("127.0.0.1", "tcp", "")
    lease = leased(memory)
    with exporter(tmp_path) as (process, handoff):
        adopt(handoff, memory.pool, lease, "twin", engine.fetch)
        verify(memory, lease, IDS, len(IDS))
        monkeypatch.setattr(handoff_engine, "CHUNK_BYTES", 100)
        adopt(replace(handoff, path="/nowhere"), memory.pool, leased(memory), "twin", engine.fetch)
        before = memory.pool.bytes.clone()
        for piece in handoff.pieces:
            flip(process, piece.offset + piece.n_bytes - 1)
            with pytest.raises(HandoffError, match=f"{piece.group} of layer {piece.layer}"):
                adopt(handoff, memory.pool, lease, "twin", engine.fetch)
            flip(process, piece.offset + piece.n_bytes - 1)
        assert memory.pool.bytes.equal(before)
        with pytest.raises(HandoffError, match="not offered"):
            adopt(replace(handoff, peer=None), memory.pool, lease, "twin", engine.fetch)
        assert handoff.peer is not None
        beyond = replace(handoff, peer=Peer(session=handoff.peer.session, address=handoff.peer.address + (1 << 30)))
        with pytest.raises(HandoffError):
            adopt(beyond, memory.pool, lease, "twin", engine.fetch)
        adopt(handoff, memory.pool, lease, "twin", engine.fetch)
        process.kill()
        process.wait()
        started = time.monotonic()
        with pytest.raises(HandoffError, match="does not give it"):
            adopt(handoff, memory.pool, lease, "twin", engine.fetch)
        print(f"\na dead exporter is known after {(time.monotonic() - started) * 1e3:.1f} ms")
        assert time.monotonic() - started < 5
        verify(memory, lease, IDS, len(IDS))


def test_workers_hand_over_by_it(tmp_path: Path) -> None:
    config = replace(config_of(tmp_path), handoff="mooncake")
    with LocalPair(HashModel(), config) as pair:
        for turn, n_prompt in enumerate((5, 40, 150, 151)):
            job = job_of(f"turn {turn}", n_prompt, temperature=1.0)
            assert pair.run(job).ids == answer(job)
        assert pair.prefill.stats().handoffs == 0

"""Random faults of the SSD tier: a process writes until it ends or is killed, the disk suffers, another serves on.

After every fault: no wrong bytes (every hit is compared with what its tokens determine), no failed request, no unit
lost that was acknowledged and not itself damaged, and no more bytes on the disk than the quota.
"""

import os
import random
import resource
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from forebay.kvstore.config import StoreConfig
from forebay.kvstore.log_folder import Damage, Found, file_of, numbers, scan
from forebay.kvstore.lookup import STATES
from forebay.kvstore.memory import Memory, make_memory
from forebay.kvstore.store import Lease
from tests.kvstore_twin import Owner, compute, tiny_layout, verify

LAYOUT = tiny_layout()
OWNER = Owner()
AMPLE, TIGHT = 8 << 20, 60 * 4096
NOBODY = 65534
HOURS_S = 3600.0
Unit = tuple[str, bytes]


@dataclass(frozen=True)
class Trial:
    folder: Path
    config: StoreConfig
    prompts: list[list[int]]

    @property
    def slot(self) -> Path:
        return self.folder / "ssd" / "slot-00"


def trial_of(folder: Path, rng: random.Random, quota: int) -> Trial:
    config = StoreConfig(
        device_bytes=rng.choice([24, 60]) * LAYOUT.page_bytes,
        host_bytes=rng.choice([0, 20]) * LAYOUT.page_bytes,
        run_dir=str(folder / "run"),
        checkpoints="prompt_end",
        ssd_path=str(folder / "ssd"),
        ssd_queue_bytes=1 << 20,
        ssd_bytes=quota,
        ssd_write=rng.choice(["write_through", "write_back"]),  # type: ignore[arg-type]
    )
    seeds = [random.Random(number) for number in range(4)]
    sessions = [[seed.randrange(50) for _ in range(44)] for seed in seeds]
    prompts = [session[: 9 + 7 * turn] for turn in range(5) for session in sessions]
    return Trial(folder, config, prompts)


def serve(memory: Memory, ids: list[int]) -> int:
    lease = memory.open(OWNER, memory.store.chain(ids), n_prompt=len(ids), capacity_tokens=len(ids))
    assert isinstance(lease, Lease), "no request fails"
    with lease:
        verify(memory, lease, ids, lease.hit_tokens)
        at = lease.hit_tokens
        for end in (*lease.checkpoints, len(ids)):
            compute(memory, lease, ids, at, end)
            memory.commit(lease, end)
            if end in lease.checkpoints:
                memory.checkpoint(lease, end)
            at = end
        return lease.hit_tokens


def units(memory: Memory) -> set[Unit]:
    """What can be found on the SSD."""
    ssd = memory.store._tiers.ssd
    return {(group, key) for group, keys in ssd.spans.items() for key in keys} | {
        (STATES, key) for key in ssd.checkpoints
    }


@contextmanager
def opened(trial: Trial) -> Iterator[Memory]:
    memory = make_memory(LAYOUT, trial.config, "twin")
    try:
        yield memory
    finally:
        memory.close()


def in_child(act: Callable[[int], None]) -> tuple[int, int]:
    """(pid, read end of a pipe): `act(write end)` runs in a process of its own, which ends with 0 where it returns."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(read)
            act(write)
            status = 0
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(status)
    os.close(write)
    return pid, read


def work(trial: Trial, say: int, rounds: int = 2) -> None:
    """Serve all prompts, and tell after each what is acknowledged by now."""
    with opened(trial) as memory:
        told: set[Unit] = set()
        for _ in range(rounds):
            for ids in trial.prompts:
                serve(memory, ids)
                if memory.ssd is not None and memory.ssd.log.flush(0.0):
                    new = units(memory) - told
                    os.write(say, b"".join(f"{group} {key.hex()}\n".encode() for group, key in sorted(new)))
                    told |= new


def acknowledged(read: int) -> set[Unit]:
    """What a child said, up to its last whole line."""
    with os.fdopen(read, "rb") as said:
        lines = said.read().split(b"\n")[:-1]
    return {(group.decode(), bytes.fromhex(key.decode())) for group, key in (line.split() for line in lines)}


def on_disk(trial: Trial) -> dict[Unit, list[Found]]:
    """The intact records of every unit."""
    found: dict[Unit, list[Found]] = {}
    for number in numbers(trial.slot):
        for each in scan(trial.slot, number, verify=True):
            if isinstance(each, Found):
                label = each.record.label
                group = label.group if each.record.parts == 1 else STATES
                for key in label.keys:
                    found.setdefault((group, key), []).append(each)
    return found


def run_to_its_end(trial: Trial, act: Callable[[int], None]) -> set[Unit]:
    pid, read = in_child(act)
    said = acknowledged(read)
    assert os.waitpid(pid, 0)[1] == 0, "no request fails"
    return said


def serve_on(trial: Trial, expected: set[Unit]) -> int:
    """Another process on the same folder: it finds what is expected, and serves. Returns the tokens hit."""

    def act(say: int) -> None:
        with opened(trial) as memory:
            missing = expected - units(memory)
            assert not missing, f"{len(missing)} acknowledged units lost"
            hits = [serve(memory, ids) for ids in trial.prompts[::-1]]
            memory.store.check()
            if memory.ssd is not None:
                memory.ssd.log.flush(10)
            assert held_bytes(trial) <= trial.config.ssd_bytes
            os.write(say, b"%d" % sum(hits))

    pid, read = in_child(act)
    with os.fdopen(read, "rb") as said:
        answer = said.read()
    assert os.waitpid(pid, 0)[1] == 0
    return int(answer)


def held_bytes(trial: Trial) -> int:
    return sum(file_of(trial.slot, number).stat().st_size for number in numbers(trial.slot))


def kill(trial: Trial, rng: random.Random) -> set[Unit]:
    pid, read = in_child(lambda say: work(trial, say, rounds=50))
    time.sleep(rng.random() * 0.12)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert held_bytes(trial) <= trial.config.ssd_bytes if trial.slot.exists() else True
    return acknowledged(read)


def harm(trial: Trial, rng: random.Random, how: Callable[[Path, random.Random], None]) -> set[Unit]:
    """A process ends in peace, then a segment suffers. Returns what that leaves of what was acknowledged."""
    said = run_to_its_end(trial, lambda say: work(trial, say))
    before = on_disk(trial)
    segments = [number for number in numbers(trial.slot) if file_of(trial.slot, number).stat().st_size]
    if segments:
        how(file_of(trial.slot, rng.choice(segments)), rng)
    after = on_disk(trial)
    return {unit for unit in said if len(after.get(unit, ())) == len(before.get(unit, ()))}


def truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def flip(path: Path, rng: random.Random) -> None:
    image = bytearray(path.read_bytes())
    image[rng.randrange(len(image))] ^= 1 << rng.randrange(8)
    path.write_bytes(image)


def delete(path: Path, _: random.Random) -> None:
    path.unlink()


def full_disk(trial: Trial, rng: random.Random) -> set[Unit]:
    """No file may grow beyond a random size: every request is served all the same."""

    def act(say: int) -> None:
        limit = rng.randrange(1 << 16)
        no_host = replace(trial, config=replace(trial.config, host_bytes=0))  # whose file is limited as well
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        work(no_host, say)

    return run_to_its_end(trial, act)


def read_only(trial: Trial, rng: random.Random) -> set[Unit]:
    """What was written stays; a process that may not write there serves without the tier."""
    said = run_to_its_end(trial, lambda say: work(trial, say))

    def act(say: int) -> None:
        os.chdir(trial.folder)
        (trial.folder / "run").chmod(0o777)
        if os.getuid() == 0:
            os.setuid(NOBODY)
        config = replace(trial.config, run_dir="run", ssd_path="ssd", host_bytes=0)
        with opened(replace(trial, config=config)) as memory:
            assert "denied" in (memory.ssd_failure or "")
            for ids in trial.prompts:
                serve(memory, ids)

    (trial.folder / "run").mkdir(exist_ok=True)
    (trial.folder / "ssd").chmod(0o500)
    run_to_its_end(trial, act)
    (trial.folder / "ssd").chmod(0o700)
    return said


def clock(trial: Trial, rng: random.Random) -> set[Unit]:
    """Hours back or ahead, for the files as well."""
    said = run_to_its_end(trial, lambda say: work(trial, say))
    for path in trial.slot.iterdir():
        moved = time.time() + rng.uniform(-9, 9) * HOURS_S
        os.utime(path, (moved, moved))
    return said


FAULTS: dict[str, Callable[[Trial, random.Random], set[Unit]]] = {
    "kill -9": kill,
    "truncation": lambda trial, rng: harm(trial, rng, truncate),
    "flipped bit": lambda trial, rng: harm(trial, rng, flip),
    "deleted segment": lambda trial, rng: harm(trial, rng, delete),
    "full disk": full_disk,
    "read-only disk": read_only,
    "clock": clock,
}


@pytest.mark.timeout(1200)
def test_random_faults(
    tmp_path: Path, examples: Callable[[int], int], say: Callable[[str], None], request: pytest.FixtureRequest
) -> None:
    """Several faults on one folder after another, then a new one; quotas that hold everything, and that do not."""
    rng = random.Random(None if request.config.getoption("--soak") else 6)
    counts: Counter[str] = Counter()
    trial = trial_of(tmp_path / "0", rng, AMPLE)
    for number in range(examples(1000)):
        if number % 5 == 0:
            quota = rng.choice([AMPLE, AMPLE, TIGHT])
            trial = trial_of(tmp_path / str(number), rng, quota)
        name = rng.choice(list(FAULTS))
        said = FAULTS[name](trial, rng)
        ample = trial.config.ssd_bytes == AMPLE
        hits = serve_on(trial, said if ample else set())
        counts.update({name: 1, "acknowledged units found again": len(said) * ample, "tokens hit after a fault": hits})
    say(f"\n{dict(counts)}")
    assert counts["acknowledged units found again"] > 10 * examples(100)
    assert set(FAULTS) <= counts.keys()


def test_a_record_cut_at_every_offset(tmp_path: Path) -> None:
    """And a bit flipped at every one: the records before and after stay, and nothing else is taken for one."""
    trial = trial_of(tmp_path, random.Random(1), AMPLE)
    trial = replace(trial, config=replace(trial.config, ssd_write="write_through"))
    run_to_its_end(trial, lambda say: work(replace(trial, prompts=trial.prompts[:1]), say, rounds=1))
    (number,) = numbers(trial.slot)
    path = file_of(trial.slot, number)
    image = path.read_bytes()
    whole = [each for each in scan(trial.slot, number, verify=True) if isinstance(each, Found)]
    assert len(whole) > 3
    victim = whole[1]
    start, end = victim.place.offset, victim.place.offset + victim.place.n_bytes
    for at in range(start, end):
        path.write_bytes(image[:at])
        left = list(scan(trial.slot, number, verify=False))
        assert [each for each in left if isinstance(each, Found)] == whole[:1], f"cut at {at}"
        assert at == start or isinstance(left[-1], Damage)
    for at in range(start, end):
        path.write_bytes(image[:at] + bytes([image[at] ^ 1 << at % 8]) + image[at + 1 :])
        left = [each for each in scan(trial.slot, number, verify=True) if isinstance(each, Found)]
        assert left == whole[:1] + whole[2:], f"flipped at {at}"

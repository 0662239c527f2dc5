"""The mode of a worker is chosen by its configuration alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from forebay.kvstore.config import StoreConfig
from forebay.workers.config import Mode, WorkerConfig
from forebay.workers.load import load

BLOCK = 64


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def config(run_dir: Path, mode: Mode) -> WorkerConfig:
    store = StoreConfig(device_bytes=4 << 20, host_bytes=0, handoff_bytes=1 << 20, run_dir=str(run_dir))
    return WorkerConfig(model="demo-random", mode=mode, block_tokens=BLOCK, chunk_tokens=2 * BLOCK, store=store)


def test_modes_do_not_take_each_others_bytes(tmp_path: Path) -> None:
    assert load(config(tmp_path, "exact")).fingerprint != load(config(tmp_path, "fast")).fingerprint

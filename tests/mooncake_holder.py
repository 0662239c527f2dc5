"""A process of the pool's, to be killed. Says `joined` first.

python mooncake_holder.py HOST:PORT hold BYTES                 gives memory until it is ended
python mooncake_holder.py HOST:PORT write BYTES FINGERPRINT    serves prompts and writes all it can
python mooncake_holder.py HOST:PORT put BYTES NAME             puts one object of so many bytes, says `putting` before
"""

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from forebay.kvstore.config import StoreConfig
from forebay.kvstore.pool_address import parse
from forebay.kvstore.pool_client import MooncakeClient


def main(address: str, what: str, n_bytes: str, *more: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = StoreConfig(
            device_bytes=1, run_dir=folder, pool=f"mooncake://{address}", pool_segment_bytes=int(n_bytes)
        )
        if what == "hold":
            hold(made)
        elif what == "put":
            put(replace(made, pool_segment_bytes=0), int(n_bytes), *more)
        else:
            write(Path(folder), made, *more)


def joined(made: StoreConfig) -> MooncakeClient:
    assert made.pool is not None
    address = parse(made.pool)
    assert address is not None
    client = MooncakeClient(address, made)
    print("joined", flush=True)
    return client


def hold(made: StoreConfig) -> None:
    client = joined(made)
    time.sleep(600)
    client.close()


def put(made: StoreConfig, n_bytes: int, name: str) -> None:
    client, memory = joined(made), np.ones(n_bytes, dtype=np.uint8)
    client.register(memory)
    print("putting", flush=True)
    print(client.put([name], [int(memory.ctypes.data)], [n_bytes]), flush=True)


def write(folder: Path, made: StoreConfig, fingerprint: str) -> None:
    from mooncake_rig import memory_of

    from tests.kvstore_twin import serve
    from tests.mooncake_rig import large_layout

    layout = large_layout()
    with memory_of(layout, replace(made, device_bytes=18 * layout.page_bytes), fingerprint) as memory:
        print("joined", flush=True)
        for turn in range(1 << 30):
            serve(memory, [turn % 97, *range(30)])


if __name__ == "__main__":
    main(*sys.argv[1:])

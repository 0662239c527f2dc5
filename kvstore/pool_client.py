"""Mooncake Store's client, with what its codes mean. Only this file knows its Python module.

Its codes are not what they seem (0.3.13): a put of a name that another client died writing answers 0 and stores
nothing, so a put counts only when the object is seen afterwards; `is_exist` answers with a negative number when the
master is away, so only 1 is presence. Its listeners take every interface of the machine: it wants a trusted network.
"""

import ctypes
import importlib.util
import os
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from forebay.kvstore.config import StoreConfig
from forebay.kvstore.pool_address import INSTALL, PoolAddress, PoolError

Bytes = npt.NDArray[np.uint8]
Trouble = Literal["gone", "full", "unreachable", "transfer", "size", "other"]
"""gone: no such object. full: no room for it. unreachable: the master. transfer: who holds it did not give it. size:
it has another size."""

_TROUBLES: dict[int, Trouble] = {
    -704: "gone",
    -703: "gone",  # being written, or its writer died
    -200: "full",
    -900: "unreachable",
    -901: "unreachable",
    -800: "transfer",
    -707: "transfer",  # it took longer than the master's promise to keep the object
    -600: "size",
}
PROBE_S = 1.0
LOCAL_BUFFER_BYTES = 1 << 24
_ENVIRONMENT = {
    "MC_RPC_TIMEOUT_MS": "3000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "1000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_TRANSFER_TIMEOUT": "10",
    "MC_LOG_LEVEL": "ERROR",
    "MC_YLT_LOG_LEVEL": "error",
}
"""Read by the library once: it has no other way to be told. What is set already stays."""


class Client(Protocol):
    """What the pool asks of a store. Calls may come from several threads, and may take seconds."""

    def register(self, buffer: Bytes) -> None: ...
    def put(self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[Trouble | None]:
        """None: it is there, and was seen."""
        ...

    def get(self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[Trouble | None]:
        """None: so many bytes are there now."""
        ...

    def exist(self, names: Sequence[str]) -> list[bool] | None:
        """None where the master does not answer."""
        ...

    def remove(self, name: str) -> None: ...
    def close(self) -> None: ...


class MooncakeClient:
    def __init__(self, address: PoolAddress, config: StoreConfig) -> None:
        """Joins, and gives a segment of memory. Takes seconds at worst. Raises PoolError."""
        reach(address)
        self._module = load("mooncake.store")
        self._address = address
        self._store = self._module.MooncakeDistributedStore()
        self._offload = None if config.pool_ssd_path is None else _offload_folder(Path(config.pool_ssd_path))
        code = self._store.setup(
            config.pool_host,
            config.pool_metadata,
            config.pool_segment_bytes,
            LOCAL_BUFFER_BYTES,
            config.pool_protocol,
            config.pool_devices,
            address.netloc,
            enable_ssd_offload=self._offload is not None,
            ssd_offload_path=str(self._offload or ""),
        )
        if code != 0:
            raise PoolError(f"{address}: joining failed with code {code}")
        self._replication = self._module.ReplicateConfig()
        self._replication.replica_num = config.pool_copies
        if config.pool_pin_s > 0:
            self._replication.soft_pin_action = self._module.SoftPinAction.ENABLE
            self._replication.soft_pin_ttl_ms = round(config.pool_pin_s * 1000)

    def register(self, buffer: Bytes) -> None:
        code = self._store.register_buffer(buffer.ctypes.data, buffer.nbytes)
        if code != 0:
            raise PoolError(f"{self._address}: {buffer.nbytes} bytes of memory cannot be registered: code {code}")

    def put(self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[Trouble | None]:
        codes = self._store.batch_put_from(list(names), list(addresses), list(sizes), self._replication)
        seen = self._store.batch_is_exist(list(names))
        return [
            _trouble(code) if code != 0 else None if there == 1 else _trouble(there)
            for code, there in zip(codes, seen, strict=True)
        ]

    def get(self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[Trouble | None]:
        codes = self._store.batch_get_into(list(names), list(addresses), list(sizes))
        return [None if code == size else _trouble(code) for code, size in zip(codes, sizes, strict=True)]

    def exist(self, names: Sequence[str]) -> list[bool] | None:
        codes = self._store.batch_is_exist(list(names))
        if any(_trouble(code) == "unreachable" for code in codes):
            return None
        return [code == 1 for code in codes]

    def remove(self, name: str) -> None:
        self._store.remove(name, True)

    def close(self) -> None:
        """Seconds, where the master is away. What it gave to the pool goes with it, the files too."""
        self._store.close()
        self._store = None  # its last threads end with it
        if self._offload is not None:
            shutil.rmtree(self._offload, ignore_errors=True)


def check_installed() -> None:
    """Raises PoolError. Loads nothing of it."""
    try:
        found = importlib.util.find_spec("mooncake") is not None
        ctypes.CDLL("libibverbs.so.1")
    except OSError as error:
        raise PoolError(f"Mooncake cannot be loaded ({error}): {INSTALL}") from None
    if not found:
        raise PoolError(f"Mooncake is not installed: {INSTALL}")


def reach(address: PoolAddress) -> None:
    """Raises PoolError where no master answers. The library would try for a minute and a half."""
    try:
        socket.create_connection((address.host, address.port), PROBE_S).close()
    except OSError as error:
        raise PoolError(f"{address}: no master answers: {error.strerror or error}") from None


def load(name: str) -> Any:
    """A module of Mooncake. Raises PoolError."""
    for key, value in _ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PoolError(f"Mooncake cannot be loaded ({error}): {INSTALL}") from None


def _trouble(code: int) -> Trouble:
    """Of what is not as it should be. 0 is an object that is not to be seen, and a count of bytes another size."""
    if code > 0:
        return "size"
    return "gone" if code == 0 else _TROUBLES.get(code, "other")


def _offload_folder(path: Path) -> Path:
    """This process's own, a file an object: of Mooncake's backends the one that keeps what it took, and takes no more.
    What dead processes left there nobody can find any more."""
    for old in path.glob("worker-*"):
        if not Path("/proc", old.name.removeprefix("worker-")).exists():
            shutil.rmtree(old, ignore_errors=True)
    folder = path / f"worker-{os.getpid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ["MOONCAKE_OFFLOAD_FILE_STORAGE_PATH"] = str(folder)
    os.environ.setdefault("MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR", "file_per_key_storage_backend")
    os.environ.setdefault("MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS", "1")
    return folder

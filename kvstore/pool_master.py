"""A `mooncake_master` of one's own: a process on loopback ports, started again under the same address when it dies.

    with KeptMaster() as master:
        master.address                     stays, whatever happens to the process

What a master knew is gone with it: its clients join the next one by themselves within seconds, and what they held
before is free again.
"""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from forebay.kvstore.pool_address import PoolAddress, PoolError
from forebay.kvstore.pool_client import check_installed

READY_S = 10.0
STOP_S = 3.0
LOOK_EVERY_S = 0.1
RESTART_AFTER_S = 0.5
CLIENT_TTL_S = 3
"""How long a silent client keeps its segment: until then reads of what it held fail."""

READ_TTL_S = 3
"""How long what was just read or asked for cannot be evicted."""

EVICTED_SHARE = 0.1
WRITE_TTL_S = 20
"""How long a put may take. What a dead client left unfinished is free afterwards."""

_STARTER = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"
"""Becomes the master. SIGTERM comes (PR_SET_PDEATHSIG) when the process that keeps it is gone, however that ended."""


class KeptMaster:
    """A context manager. `log`: where its lines go, by default nowhere. Raises PoolError where it cannot start."""

    def __init__(self, *, offload: bool = False, log: Path | None = None) -> None:
        self._program = _program()
        self._offload = offload
        self._log = log
        ports = _free_ports(2)
        self.address = PoolAddress("127.0.0.1", ports[0])
        self.metrics_port = ports[1]
        self.restarts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="mooncake-master", daemon=True)

    @property
    def pid(self) -> int | None:
        """None while there is none."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def __enter__(self) -> Self:
        self._process = self._start()
        if not self.wait_ready():
            self._stop()
            raise PoolError(f"mooncake_master does not answer at {self.address.netloc} after {READY_S:.0f} s")
        self._keeper.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._keeper.join()
        self._stop()

    def wait_ready(self, timeout_s: float = READY_S) -> bool:
        """Until it answers."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            try:
                socket.create_connection((self.address.host, self.address.port), 0.5).close()
                return True
            except OSError:
                time.sleep(0.02)
        return False

    def _keep(self) -> None:
        while not self._closing.wait(LOOK_EVERY_S):
            if self.pid is None and not self._closing.wait(RESTART_AFTER_S):
                self._process = self._start()
                self.restarts += 1

    def _start(self) -> "subprocess.Popen[bytes]":
        flags = {
            "rpc_address": self.address.host,
            "rpc_port": self.address.port,
            "metrics_host": self.address.host,
            "metrics_port": self.metrics_port,
            "client_ttl": CLIENT_TTL_S,
            "default_kv_lease_ttl": f"{READ_TTL_S}s",
            "eviction_ratio": EVICTED_SHARE,
            "put_start_discard_timeout_sec": WRITE_TTL_S // 2,
            "put_start_release_timeout_sec": WRITE_TTL_S,
            "enable_offload": str(self._offload).lower(),
            "minloglevel": 1,
            "logtostderr": "true",
        }
        words = [sys.executable, "-c", _STARTER, self._program, *(f"--{name}={value}" for name, value in flags.items())]
        with _opened(self._log) as log:
            try:
                # A session of its own: what a terminal sends to stop the endpoint would end it before the workers.
                return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
            except OSError as error:
                raise PoolError(f"{self._program}: {error.strerror}") from None

    def _stop(self) -> None:
        process = self._process
        assert process is not None
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _program() -> str:
    """The script beside this interpreter becomes the master itself."""
    check_installed()
    return str(Path(sys.executable).with_name("mooncake_master"))


def _opened(log: Path | None) -> IO[bytes]:
    return open(log if log is not None else os.devnull, "ab")


def _free_ports(count: int) -> list[int]:
    """Free now: nobody else is told of them, but nothing holds them either."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()

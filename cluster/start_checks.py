"""What is looked at before anything starts, so that a common mistake is answered by one line that says the way out."""

import os
import socket
from pathlib import Path

from forebay.cluster.config import EndpointConfig, worker_config
from forebay.kvstore.pool_address import PoolError
from forebay.kvstore.pool_client import check_installed
from forebay.workers.config_fields import FolderError
from forebay.workers.hf_config import read_config

GIB = 1 << 30
SERVICE_BYTES = 1536 << 20
"""Ray, Serve, the router and the ingresses of two clusters, measured."""


RUN_PATH_CHARS = 107 - len("/ray/session_2026-11-30_23-59-59_999999_9999999/sockets/plasma_store")


class StartError(Exception):
    """The endpoint cannot start: one line, with the way out."""


def bind(host: str, port: int, key: str) -> socket.socket:
    """A socket that holds the port and does not listen yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise StartError(f"host {host}: {error.strerror}: choose another with --host") from None
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise StartError(f"port {port} on {host}: {error.strerror}: choose another with {key}") from None
    return bound


def check_run_dir(config: EndpointConfig) -> None:
    """Ray's sockets lie below the run folder, and the system bounds their names."""
    path = str(config.run_path.absolute())
    if len(path) > RUN_PATH_CHARS:
        raise StartError(f"run_dir {path}: more than {RUN_PATH_CHARS} characters: choose a shorter one with --run-dir")


def check_model(config: EndpointConfig) -> None:
    """What can be said of a folder without torch, so before anything is waited for."""
    folder = Path(config.model)
    if folder.is_dir():
        try:
            read_config(folder)
        except FolderError as error:
            raise StartError(str(error)) from None
    elif os.sep in config.model:
        raise StartError(f"model {config.model}: no such folder")


def check_mooncake(config: EndpointConfig) -> None:
    """Before any worker is started that would fail over it."""
    worker = worker_config(config, "prefill", "")
    if worker.store.pool is not None or worker.handoff == "mooncake":
        try:
            check_installed()
        except PoolError as error:
            raise StartError(str(error)) from None


def check_ports(config: EndpointConfig) -> None:
    """The ingresses bind theirs later, in their own processes, and again after each restart."""
    for port in config.ingress_ports:
        bind("127.0.0.1", port, "ingress_port in the configuration").close()


def check_memory(config: EndpointConfig, weight_bytes: int) -> None:
    """Weights are counted twice: they are read before they are laid out for computing."""
    workers = config.clusters * (config.replicas("prefill").least + config.replicas("decode").least)
    needed = SERVICE_BYTES + config.needed_bytes + 2 * workers * weight_bytes
    available = available_bytes()
    if needed > available:
        raise StartError(
            f"memory: {needed / GIB:.1f} GiB needed, {available / GIB:.1f} GiB available: fewer --clusters, --prefill "
            "or --decode, or smaller device_bytes, host_bytes, handoff_bytes in [store]"
        )


def check_pools(config: EndpointConfig, least_bytes: int) -> None:
    """A worker whose pool holds not one sequence would start, and refuse everything."""
    store = worker_config(config, "prefill", "").store
    for key in ("device_bytes", "handoff_bytes"):
        if getattr(store, key) < least_bytes:
            raise StartError(f"[store] {key} = {getattr(store, key)}: one block of this model takes {least_bytes}")


def available_bytes(proc: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """What this process may still take: the machine's available memory, or its control group's where that is less."""
    fields = dict(line.split(":", 1) for line in proc.read_text().splitlines())
    machine = int(fields["MemAvailable"].split()[0]) << 10
    try:
        limit = int((cgroup / "memory.max").read_text())  # "max" where there is no limit
        return min(machine, limit - int((cgroup / "memory.current").read_text()))
    except (OSError, ValueError):
        return machine

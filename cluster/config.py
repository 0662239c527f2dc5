"""One endpoint's configuration: a frozen value, every key of which is a key of the TOML file and a flag or a table.

The tables `[workers]`, `[store]` and `[router]` hold the fields of those rooms' own dataclasses, less what the
endpoint itself decides (addresses, folders, the model).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from forebay.cluster.beat import Kind
from forebay.cluster.rundir import default_path
from forebay.kvstore.config import StoreConfig
from forebay.router.config import ClusterConfig, ModelConfig, RouterConfig
from forebay.workers.config import WorkerConfig

MIB = 1 << 20
STORE_DEFAULTS: dict[str, Any] = {"device_bytes": 256 * MIB, "host_bytes": 256 * MIB, "handoff_bytes": 256 * MIB}
PREFILL_ONLY = ("host_bytes", "handoff_bytes", "ssd_bytes")
DIRECTORY_SHARE = 16
"""The host tier's directory takes this part of it at most."""

PROCESS_BYTES = 400 * MIB
"""What a worker takes beside its pages and weights: the interpreter, torch, Ray."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """How many workers of one kind a cluster has; with two numbers Serve's autoscaling chooses between them."""

    least: int
    most: int

    def __post_init__(self) -> None:
        assert 1 <= self.least <= self.most, f"{self.least}:{self.most} is not a number of workers"

    @classmethod
    def parse(cls, text: str | int) -> "Replicas":
        """`2` or `1:3`."""
        least, _, most = str(text).partition(":")
        return cls(least=int(least), most=int(most or least))


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig:
    """`prefill` and `decode` are workers a cluster: `2`, or `1:3` for Serve to scale between.

    `ingress_port` is the first cluster's; the others follow. None: the ports after `port`.
    """

    model: str = "demo"
    served_model_name: str | None = None
    aliases: tuple[str, ...] = ()
    thinking: bool = False  # where a request does not say; off, histories without reasoning keep their hits
    host: str = "127.0.0.1"
    port: int = 8000
    ingress_port: int | None = None
    clusters: int = 2
    prefill: str | int = 1
    decode: str | int = 1
    object_store_bytes: int = 256 * MIB
    run_dir: str | None = None

    workers: Mapping[str, Any] = field(default_factory=dict)
    store: Mapping[str, Any] = field(default_factory=dict)
    router: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert 1 <= self.clusters <= 64, "clusters: 1 to 64"
        assert 0 < self.port < 65536, "port: 1 to 65535"
        assert self.ingress_ports[-1] < 65536, "ingress_port: the last cluster's exceeds 65535"
        assert self.port not in self.ingress_ports, "ingress_port: the router has this port"
        assert self.object_store_bytes >= 80 * MIB, "object_store_bytes: Ray takes no less than 80 MiB"
        for kind in ("prefill", "decode"):
            try:
                Replicas.parse(getattr(self, kind))
            except (ValueError, AssertionError):
                raise AssertionError(f"{kind}: `2` or `1:3`, not {getattr(self, kind)!r}") from None

    @property
    def cluster_names(self) -> list[str]:
        return [f"c{number + 1}" for number in range(self.clusters)]

    @property
    def ingress_ports(self) -> list[int]:
        first = self.port + 1 if self.ingress_port is None else self.ingress_port
        return list(range(first, first + self.clusters))

    @property
    def run_path(self) -> Path:
        return Path(self.run_dir) if self.run_dir is not None else default_path(self.port)

    def replicas(self, kind: Kind) -> Replicas:
        return Replicas.parse(self.prefill if kind == "prefill" else self.decode)

    @property
    def model_name(self) -> str:
        return self.served_model_name or Path(self.model).name or self.model

    @property
    def needed_bytes(self) -> int:
        """Memory that the workers take at least: weights come on top."""
        workers = sum(
            self.replicas(kind).least * (PROCESS_BYTES + _pool_bytes(worker_config(self, kind, "").store))
            for kind in KINDS
        )
        return self.clusters * (workers + worker_config(self, "prefill", "").store.host_bytes)

    @property
    def arena_bytes(self) -> int:
        """Of that, what lies in the memory file system: the host tier once a cluster, with what says what is in it."""
        each = worker_config(self, "prefill", "").store
        host_bytes = each.host_bytes + each.host_bytes // DIRECTORY_SHARE
        return self.clusters * (host_bytes + self.replicas("prefill").most * each.handoff_bytes)


KINDS: tuple[Kind, ...] = ("prefill", "decode")


def _pool_bytes(store: StoreConfig) -> int:
    """Of one worker; the host tier is the node's."""
    ssd_bytes = store.ssd_queue_bytes if store.ssd_path is not None else 0
    pool_bytes = store.pool_segment_bytes + 2 * store.pool_queue_bytes if store.pool is not None else 0
    return store.device_bytes + store.handoff_bytes + ssd_bytes + pool_bytes


def worker_config(config: EndpointConfig, kind: Kind, memory: str) -> WorkerConfig:
    """`memory` is the node's arena folder. A decode worker has no prefix cache, so neither lower tier nor arena."""
    store: dict[str, Any] = {**STORE_DEFAULTS, **config.store}
    if kind == "decode":
        store |= {**dict.fromkeys(PREFILL_ONLY, 0), "ssd_path": None, "pool": None}
    made = StoreConfig(run_dir=memory, **store)
    for name in ("ssd_path", "pool_ssd_path"):
        path = getattr(made, name)
        assert path is None or Path(path).is_absolute(), f"[store] {name}: not an absolute path"
    return WorkerConfig(model=config.model, store=made, **config.workers)


def of_cluster(worker: WorkerConfig, cluster: str) -> WorkerConfig:
    """Sessions come back to their cluster, so its workers have a host tier of its own, and SSD folders below one."""
    path = worker.store.ssd_path
    ssd_path = None if path is None else str(Path(path) / cluster)
    return replace(worker, store=replace(worker.store, cluster=cluster, ssd_path=ssd_path))


def router_config(config: EndpointConfig, model: ModelConfig) -> RouterConfig:
    """The router's view: its clusters are the ingresses of this endpoint."""
    clusters = tuple(
        ClusterConfig(name=name, url=f"http://{_loopback(config.host)}:{port}")
        for name, port in zip(config.cluster_names, config.ingress_ports, strict=True)
    )
    return RouterConfig(host=config.host, port=config.port, clusters=clusters, model=model, **config.router)


def _loopback(host: str) -> str:
    """Ingresses are for the router of this machine only, wherever the router itself listens."""
    return "[::1]" if host == "::1" else "127.0.0.1"

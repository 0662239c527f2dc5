"""How much a worker's store holds, where, and by which policies."""

from dataclasses import dataclass
from typing import Literal, get_args

from forebay.kvstore.policy import DEFAULT_CHECKPOINTS, PrefillCost, parse
from forebay.kvstore.pool_address import PEER_TO_PEER, check_metadata
from forebay.kvstore.pool_address import parse as parse_address

WritePolicy = Literal["write_back", "write_through"]
SsdWritePolicy = Literal["write_back", "write_through", "selective"]
PoolWritePolicy = Literal["write_through", "selective"]

POOL_SEGMENT_BYTES_MIN = 1 << 24
CLASS_BYTES_MAX = 32
_POSITIVE = ("device_bytes", "remembered_keys", "prefill_token_s", "ssd_uses", "ssd_queue_bytes", "remembered_uses")
_POOL_POSITIVE = ("pool_uses", "pool_copies", "pool_queue_bytes", "pool_known_pages", "pool_ask_s", "pool_read_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassShare:
    """What a class of requests may keep for later ones. A unit counts for the class that stored it there.

    Raises ValueError that names the field.
    """

    name: str
    device_bytes: int | None = None
    host_bytes: int | None = None
    ssd_bytes: int | None = None
    """How much of each tier it holds at most, of the device what no live request uses: beyond that its own goes first.
    Of the device and the SSD that is one worker's, of the host the node's. None: what the tier has."""

    ttl_s: float | None = None
    """What no request used for so long is not hit and goes; a use by another class counts for as long as that class
    keeps things. The cluster-wide pool, which forgets by rules of its own, is not given any of it. A restart of the
    worker counts as a use of what lies on the SSD. None: it stays until there is no room."""

    def __post_init__(self) -> None:
        if not 0 < len(self.name.encode()) <= CLASS_BYTES_MAX:
            raise ValueError(f"classes: name: 1 to {CLASS_BYTES_MAX} bytes, not {self.name!r}")
        for each in ("device_bytes", "host_bytes", "ssd_bytes"):
            if (getattr(self, each) or 0) < 0:
                raise ValueError(f"classes: {self.name}: {each}: must not be less than 0")
        if self.ttl_s is not None and self.ttl_s <= 0:
            raise ValueError(f"classes: {self.name}: ttl_s: must be more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """`host_bytes`: of the node's host tier; 0: none. `handoff_bytes` 0: nothing is exported.

    Raises ValueError that names the field.
    """

    device_bytes: int
    host_bytes: int = 0
    handoff_bytes: int = 0
    run_dir: str
    """Folder of this node's arenas, in shared memory where there is one."""

    cluster: str = "local"
    """Workers of one cluster and node share the host tier."""

    rank: int = 0
    ranks: int = 1
    """Which of the tensor-parallel ranks this store is of. All hold the same rows, so below the device they are stored
    once; each has states of its own."""

    checkpoints: str = DEFAULT_CHECKPOINTS
    """Where prefill keeps states: kvstore.policy."""

    write: WritePolicy = "write_back"
    """When pages go to the host: on eviction, or as soon as a page is full or a checkpoint is kept."""

    ssd_path: str | None = None
    """Folder of the SSD tier, below which every cluster has one, and every worker in that. None: no SSD tier."""

    ssd_bytes: int = 0
    """How much of the disk one worker's SSD tier takes at most."""

    ssd_write: SsdWritePolicy = "write_back"
    """When pages go to the SSD: when they leave memory; as soon as a page is full or a checkpoint is kept; or with the
    `ssd_uses`-th request that uses them, the one that computed them being the first."""

    ssd_uses: int = 2
    ssd_queue_bytes: int = 1 << 28
    """What may wait to be written, or what the largest checkpoint takes if that is more: what comes when it is full
    is skipped."""

    pool: str | None = None
    """The cluster-wide tier below all others, a Mooncake Store: `mooncake://HOST:PORT` is its master, `mooncake` one
    that this endpoint starts for itself. None: no such tier. It needs the extra `mooncake`."""

    pool_write: PoolWritePolicy = "write_through"
    """When pages go there: as soon as a page is full or a checkpoint is kept, or with the `pool_uses`-th request that
    uses them."""

    pool_uses: int = 2
    pool_segment_bytes: int = 1 << 28
    """Memory that each worker gives to the pool; 0: it only uses what others give."""

    pool_copies: int = 1
    """Of each object, on different workers where there are as many: with 2 one may die and nothing is lost."""

    pool_pin_s: float = 600.0
    """How long what is written for a live request is the last to be evicted. 0: no longer than anything else."""

    pool_queue_bytes: int = 1 << 26
    """What may wait to be sent, or two of the largest objects if that is more; as much again takes what is fetched.
    What comes when it is full is skipped."""

    pool_known_pages: int = 1 << 16
    """How many pages of the pool one worker knows of at a time."""

    pool_ask_s: float = 0.05
    """How long a prompt waits at most to hear what the pool has of it."""

    pool_read_s: float = 8.0
    """How long one part of a restore may take before the prompt does without: with more than one copy, longer than the
    master needs to notice a dead holder (4 to 5 s), after which another copy is read."""

    pool_ssd_path: str | None = None
    """Folder on each node where Mooncake keeps what its memory has no room for, as long as the worker lives that wrote
    it; a master at an address must have its offload enabled. None: memory only."""

    pool_metadata: str = PEER_TO_PEER
    """Mooncake's metadata server; with P2PHANDSHAKE none is needed."""

    pool_host: str = "127.0.0.1"
    """This node, as the other ones reach it."""

    pool_protocol: Literal["tcp", "rdma"] = "tcp"
    pool_devices: str = ""
    """Names of the RDMA devices, with commas; empty: Mooncake chooses."""

    classes: tuple[ClassShare, ...] = ()
    """Quotas and times to live of classes, by the router's names of them. A class that is not here has neither."""

    purge_ended: bool = False
    """When a client says that its session is over, what that session alone has used is erased at once from device,
    host and SSD, and not only the first to be evicted. The cluster-wide pool keeps its copies until it evicts them."""

    prefill_token_s: float = 1e-4
    prefill_pair_s: float = 1e-10
    """What prefill costs a token, and a pair of tokens: how the eviction weighs long prefixes against short ones."""

    remembered_keys: int = 1 << 16
    """How many lost blocks and checkpoints are remembered, to say why a look-up missed."""

    remembered_uses: int = 1 << 18
    """Of how many blocks, and of how many checkpoints, the latest use is remembered, in a tier or not: what the
    eviction learns from. About 200 bytes each."""

    def __post_init__(self) -> None:
        parse(self.checkpoints)
        if self.write not in get_args(WritePolicy):
            raise ValueError(f"write: {self.write!r} is none of {', '.join(get_args(WritePolicy))}")
        if self.ssd_write not in get_args(SsdWritePolicy):
            raise ValueError(f"ssd_write: {self.ssd_write!r} is none of {', '.join(get_args(SsdWritePolicy))}")
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank: {self.rank} is none of {self.ranks} ranks")
        if (self.ssd_path is None) != (self.ssd_bytes == 0):
            raise ValueError("ssd_path, ssd_bytes: the SSD tier takes both, or neither")
        if len({each.name for each in self.classes}) < len(self.classes):
            raise ValueError("classes: each name once")
        if self.pool is not None:
            self._check_pool(self.pool)
        for name in (*_POSITIVE, *_POOL_POSITIVE):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: must be more than 0")
        for name in ("host_bytes", "handoff_bytes", "ssd_bytes", "prefill_pair_s", "pool_segment_bytes", "pool_pin_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: must not be less than 0")

    def _check_pool(self, pool: str) -> None:
        parse_address(pool)
        check_metadata(self.pool_metadata)
        if 0 < self.pool_segment_bytes < POOL_SEGMENT_BYTES_MIN:
            raise ValueError(f"pool_segment_bytes: 0, or at least {POOL_SEGMENT_BYTES_MIN}: Mooncake takes no less")
        if self.pool_write not in get_args(PoolWritePolicy):
            raise ValueError(f"pool_write: {self.pool_write!r} is none of {', '.join(get_args(PoolWritePolicy))}")
        if self.pool_protocol not in ("tcp", "rdma"):
            raise ValueError(f"pool_protocol: tcp or rdma, not {self.pool_protocol!r}")

    @property
    def cost(self) -> PrefillCost:
        return PrefillCost(token_s=self.prefill_token_s, pair_s=self.prefill_pair_s)

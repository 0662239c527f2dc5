"""The router's configuration: one frozen value; every default that a user can meet stands here."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """A cluster as the router knows it: its ingress' URL, and its capacity relative to the others."""

    name: str
    url: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        assert self.name
        assert self.weight > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The served model. `name` is what /v1/models shows; every alias is answered as well.

    `thinking`, `temperature` and `top_p` hold where a request does not say.
    `token_bytes` and `state_bytes` are the cache of one token and of one sequence, for the estimate of resident bytes.
    """

    name: str
    aliases: tuple[str, ...] = ()
    folder: str
    context_tokens: int
    block_tokens: int
    token_bytes: int
    state_bytes: int
    thinking: bool = True
    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key that is let in. Rules name it; the secret stands nowhere else."""

    name: str
    secret: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassConfig:
    """A class and its two budgets in each cluster: uncached prefill tokens (rate, burst) and resident bytes.

    `queue_wait_s` is how long a request may wait for admission; lower `priority` goes first in a cluster. `borrows`:
    the class may use what others leave unused (bucket.py) and the shared bytes.
    """

    name: str
    priority: int = 0
    prefill_tokens_per_s: float
    burst_tokens: float
    resident_bytes: int
    queue_requests: int = 64
    queue_wait_s: float = 10.0
    borrows: bool = True

    def __post_init__(self) -> None:
        assert self.prefill_tokens_per_s > 0
        assert self.burst_tokens > 0
        assert self.resident_bytes > 0
        assert self.queue_requests >= 0
        assert self.queue_wait_s > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassRule:
    """Requests that match every bound are of the class. Bounds are inclusive; no keys: any key."""

    class_name: str
    keys: tuple[str, ...] = ()
    prompt_tokens_min: int = 0
    prompt_tokens_max: int | None = None
    uncached_tokens_min: int = 0
    uncached_tokens_max: int | None = None


MIB, GIB = 2**20, 2**30
# Sized for the built-in model on a small machine: batch work runs beside the others, never in their way.
DEFAULT_CLASSES = (
    ClassConfig(name="interactive", priority=0, prefill_tokens_per_s=4000, burst_tokens=32_000, resident_bytes=4 * GIB),
    ClassConfig(name="agent", priority=1, prefill_tokens_per_s=4000, burst_tokens=64_000, resident_bytes=8 * GIB),
    ClassConfig(
        name="batch",
        priority=2,
        prefill_tokens_per_s=200,
        burst_tokens=2000,
        resident_bytes=16 * MIB,
        borrows=False,
    ),
)
DEFAULT_RULES = (
    ClassRule(class_name="batch", keys=("batch",)),
    ClassRule(class_name="interactive", keys=("interactive",)),
    ClassRule(class_name="interactive", uncached_tokens_max=4096),
    ClassRule(class_name="agent"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """`keys` empty: everybody is let in, and the bearer token, if any, is taken as the key's name."""

    host: str = "127.0.0.1"
    port: int = 8000
    clusters: tuple[ClusterConfig, ...]
    model: ModelConfig
    keys: tuple[ApiKey, ...] = ()
    classes: tuple[ClassConfig, ...] = DEFAULT_CLASSES
    rules: tuple[ClassRule, ...] = DEFAULT_RULES

    spare_s: float = 2.0  # what the classes leave unused and may lend, in seconds of their rates together
    shared_resident_bytes: int = 2 * GIB  # in each cluster, for whichever class has used up its own
    sessions: int = 100_000  # remembered for the estimate of cached tokens
    idle_s: float = 300.0  # a session quiet for so long may move back to its primary

    output_tokens_default: int = 4096  # where the client names no max_tokens
    choices_max: int = 16  # n times the number of prompts
    body_bytes_max: int = 64 * 2**20
    body_s: float = 30.0  # time for a client to send its body
    open_requests_max: int = 4096
    request_s: float = 3600.0
    tries: int = 3  # clusters that one request is given to

    probe_every_s: float = 0.5
    probe_s: float = 1.0
    probes_fall: int = 2
    probes_rise: int = 2
    hung_s: float = 5.0
    connect_s: float = 1.0

    keepalive_s: float = 5.0  # comments on a silent stream
    idle_connection_s: int = 900  # agents think for long between two turns
    drain_s: float = 5.0

    def __post_init__(self) -> None:
        assert self.clusters, "at least one cluster"
        assert len({cluster.name for cluster in self.clusters}) == len(self.clusters), "cluster names are unique"
        names = {each.name for each in self.classes}
        assert len(names) == len(self.classes), "class names are unique"
        assert {rule.class_name for rule in self.rules} <= names, "rules name classes that exist"
        last = self.rules[-1]
        assert last == ClassRule(class_name=last.class_name), "the last rule matches everything"

    @property
    def weights(self) -> dict[str, float]:
        return {cluster.name: cluster.weight for cluster in self.clusters}

"""One TOML file configures all; whatever is wrong in it is named by its key."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from forebay.cluster.config import (
    PROCESS_BYTES,
    STORE_DEFAULTS,
    EndpointConfig,
    Replicas,
    of_cluster,
    router_config,
    worker_config,
)
from forebay.cluster.config_file import ConfigError, load, show
from forebay.router.config import ModelConfig

MODEL = ModelConfig(name="m", folder="", context_tokens=1, block_tokens=1, token_bytes=1, state_bytes=1)


def load_text(folder: Path, text: str, **flags: Any) -> EndpointConfig:
    path = folder / "site.toml"
    path.write_text(text)
    return load(path, flags)


def test_flags_go_before_the_file_and_the_file_before_defaults(tmp_path: Path) -> None:
    config = load_text(tmp_path, 'port = 9000\nclusters = 3\nprefill = "1:3"', clusters=4)
    assert (config.port, config.clusters, config.host) == (9000, 4, "127.0.0.1")
    assert config.replicas("prefill") == Replicas(least=1, most=3)
    assert config.replicas("decode") == Replicas(least=1, most=1)
    assert config.ingress_ports == [9001, 9002, 9003, 9004]
    assert config.cluster_names == ["c1", "c2", "c3", "c4"]


def test_tables_reach_their_rooms(tmp_path: Path) -> None:
    text = """
        [workers]
        slots = 5
        [store]
        device_bytes = 1000000
        ssd_path = "/ssd"
        ssd_bytes = 10
        [router]
        drain_s = 2
        keys = [{ name = "a", secret = "s" }]
    """
    config = load_text(tmp_path, text)
    decode, prefill = worker_config(config, "decode", "/m"), worker_config(config, "prefill", "/m")
    assert (decode.slots, decode.store.device_bytes, decode.store.run_dir) == (5, 1_000_000, "/m")
    assert (decode.store.host_bytes, decode.store.handoff_bytes) == (0, 0), "a decode worker needs neither"
    assert (decode.store.ssd_path, prefill.store.ssd_path, prefill.store.ssd_bytes) == (None, "/ssd", 10)
    assert min(prefill.store.host_bytes, prefill.store.handoff_bytes) > 0
    assert of_cluster(prefill, "c2").store.ssd_path == "/ssd/c2"
    assert (of_cluster(prefill, "c2").store.cluster, of_cluster(decode, "c2").store.ssd_path) == ("c2", None)
    router = router_config(config, MODEL)
    assert router.drain_s == 2.0
    assert router.keys[0].secret == "s"
    assert [cluster.url for cluster in router.clusters] == ["http://127.0.0.1:8001", "http://127.0.0.1:8002"]


def test_a_flag_may_be_a_key_of_a_table(tmp_path: Path) -> None:
    flags = {"store.pool": "mooncake://h:1"}
    config = load_text(tmp_path, "[store]\npool = 'mooncake'\npool_copies = 2", **flags)
    assert (config.store["pool"], config.store["pool_copies"]) == ("mooncake://h:1", 2)
    assert worker_config(config, "decode", "/m").store.pool is None, "a decode worker has no prefix cache"
    assert config.needed_bytes > load(None, {}).needed_bytes
    assert load(None, flags).store == {"pool": "mooncake://h:1"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("clusterz = 2", ["clusterz", "did you mean clusters?"]),
        ("clusters = 'two'", ["clusters", "int"]),
        ("clusters = 0", ["clusters"]),
        ("port = 70000", ["port"]),
        ("port = 8001\ningress_port = 8000", ["ingress_port"]),
        ("prefill = '3:1'", ["prefill", "3:1"]),
        ("decode = 'many'", ["decode", "many"]),
        ("object_store_bytes = 1", ["object_store_bytes"]),
        ("[workers]\nslot = 1", ["[workers] slot", "did you mean slots?"]),
        ("[workers]\nslots = 0", ["site.toml"]),
        ("[workers]\nmodel = 'x'", ["[workers] model"]),
        ("[store]\ncheckpoints = 'sometimes'", ["sometimes"]),
        ("[store]\nssd_path = '/ssd'", ["ssd_bytes"]),
        ("[store]\nssd_path = 'ssd'\nssd_bytes = 1", ["ssd_path", "absolute"]),
        ("[store]\nssd_write = 'never'", ["ssd_write", "never"]),
        ("[store]\nclasses = [{name = 'batch', ttl_s = 0}]", ["classes", "batch", "ttl_s"]),
        ("[store]\nclasses = [{name = 'batch', ttl = 1}]", ["[store] classes", "ttl"]),
        ("[store]\nclasses = [{name = 'bulk', ttl_s = 1}]", ["[store] classes", "bulk", "interactive, agent, batch"]),
        ("[store]\npool = 'redis://h:1'", ["pool", "mooncake://HOST:PORT", "redis://h:1"]),
        ("[store]\npool = 'mooncake://h'", ["pool", "mooncake://HOST:PORT"]),
        ("[store]\npool = 'mooncake'\npool_metadata = 'redis://h:1'", ["pool_metadata", "redis://h:1", "abort"]),
        ("[store]\npool = 'mooncake'\npool_copies = 0", ["pool_copies"]),
        ("[store]\npool = 'mooncake'\npool_segment_bytes = 1", ["pool_segment_bytes", "16777216"]),
        ("[store]\npool = 'mooncake'\npool_write = 'never'", ["pool_write", "never"]),
        ("[workers]\nhandoff = 'pigeon'", ["[workers] handoff", "pigeon"]),
        ("[router]\nport = 1", ["[router] port"]),
        ("[router]\nkeys = [{name = 'a', secret = 'b', colour = 1}]", ["[router] keys", "colour"]),
        ("[router]\nkeys = [{name = 'a'}]", ["[router] keys", "secret"]),
        ("workers = 3", ["workers"]),
        ("a = ", ["not TOML"]),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_text(tmp_path, text)
    assert len(error.value.faults) == 1
    for word in words:
        assert word in error.value.faults[0]


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_text(tmp_path, "clusterz = 2\n[workers]\nslot = 1\nthreads = 'a'")
    assert len(error.value.faults) == 3


def test_a_missing_file_is_an_error_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "none.toml", {})


def test_what_is_shown_is_a_configuration_that_says_the_same(tmp_path: Path) -> None:
    config = load_text(
        tmp_path,
        'prefill = "1:3"\naliases = ["a\\"b", "c"]\n[workers]\nslots = 3\n[router]\ntries = 2'
        "\n[store]\nclasses = [{name = 'batch', device_bytes = 9, ttl_s = 1.5}]",
    )
    text = "\n".join(show(config))
    assert tomllib.loads(text)["workers"]["slots"] == 3
    again = load_text(tmp_path, text)
    assert again.aliases == config.aliases
    for kind in ("prefill", "decode"):
        assert worker_config(again, kind, "/m") == worker_config(config, kind, "/m")
        assert again.replicas(kind) == config.replicas(kind)
    assert router_config(again, MODEL) == router_config(config, MODEL)


def test_a_keys_secret_is_not_shown(tmp_path: Path) -> None:
    config = load_text(tmp_path, '[router]\nkeys = [{ name = "team", secret = "hunter2" }]')
    text = "\n".join(show(config))
    assert "team" in text
    assert "hunter2" not in text


def test_needed_memory_grows_with_workers_and_pages() -> None:
    small, large = EndpointConfig(clusters=1), EndpointConfig(clusters=1, decode=3)
    assert large.needed_bytes > small.needed_bytes
    assert EndpointConfig(clusters=1, store={"device_bytes": 1 << 40}).needed_bytes > 2 << 40
    assert EndpointConfig(clusters=2).arena_bytes == 2 * small.arena_bytes
    sizes = {"host_bytes": 1 << 30, "handoff_bytes": 1 << 20}
    one, three = (EndpointConfig(clusters=1, prefill=n, store=sizes) for n in (1, 3))
    assert three.arena_bytes - one.arena_bytes == 2 << 20, "workers of one cluster share the host tier"
    each = PROCESS_BYTES + STORE_DEFAULTS["device_bytes"] + (1 << 20)
    assert three.needed_bytes - one.needed_bytes == 2 * each

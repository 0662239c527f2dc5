"""The pool's master as `up` has it: its own, another one's, or a line that says what is missing."""

import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from mooncake_rig import needs_mooncake, wait_until

from forebay.cluster import processes
from forebay.cluster.config import EndpointConfig, worker_config
from forebay.cluster.pool import pool
from forebay.cluster.start_checks import StartError, check_mooncake
from forebay.kvstore import pool_client
from forebay.kvstore.pool_address import PoolError, parse


def test_none_is_asked_for(tmp_path: Path) -> None:
    config = EndpointConfig()
    check_mooncake(config)
    with pool(config, tmp_path, print) as made:
        assert (made.config, made.master, made.about()) == (config, None, {})


@pytest.mark.parametrize("config", [{"store": {"pool": "mooncake"}}, {"workers": {"handoff": "mooncake"}}])
def test_what_is_not_installed_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, dict[str, str]]
) -> None:
    monkeypatch.setattr(pool_client.ctypes, "CDLL", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StartError, match=r"pip install 'forebay\[mooncake\]', and the system library libibverbs1"):
        check_mooncake(EndpointConfig(**config))  # type: ignore[arg-type]


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(pool_client.ctypes, "CDLL", missing)
    with pytest.raises(StartError, match=r"libibverbs\.so\.1: cannot open .* libibverbs1") as error:
        check_mooncake(EndpointConfig(store={"pool": "mooncake"}))
    assert "\n" not in str(error.value)
    with pytest.raises(PoolError, match="libibverbs1"):
        pool_client.load("mooncake.no_such_module")


def test_a_master_of_its_own_lives_until_the_end_and_comes_back_meanwhile(tmp_path: Path) -> None:
    needs_mooncake()
    said: list[str] = []
    with pool(EndpointConfig(store={"pool": "mooncake", "pool_copies": 2}), tmp_path, said.append) as made:
        store = worker_config(made.config, "prefill", "").store
        assert store.pool is not None
        assert parse(store.pool) is not None
        assert store.pool_copies == 2
        assert said == [f"Mooncake Store: master at {store.pool}"]
        about = made.about()["pool"]
        os.kill(about["master_pid"], signal.SIGKILL)
        wait_until(lambda: made.about()["pool"]["restarts"] == 1, 10, "it stays dead")
        again = made.about()["pool"]
        assert again["address"] == about["address"] == store.pool
        assert again["master_pid"] not in (None, about["master_pid"])
        assert made.master is not None
        assert made.master.wait_ready()
    assert not Path("/proc", str(again["master_pid"])).exists()


def test_it_does_not_outlive_the_process_that_keeps_it() -> None:
    needs_mooncake()
    code = """
        import time
        from forebay.kvstore.pool_master import KeptMaster
        with KeptMaster() as master:
            print(master.pid, flush=True)
            time.sleep(60)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout is not None
        pid = int(keeper.stdout.readline())
        assert processes.find(pid) is not None
        keeper.kill()
        wait_until(lambda: processes.find(pid) is None, 10, "it stays behind")


def test_an_address_that_does_not_answer_is_said_and_served_without(tmp_path: Path) -> None:
    said: list[str] = []
    with pool(EndpointConfig(store={"pool": "mooncake://127.0.0.1:1"}), tmp_path, said.append) as made:
        assert made.about() == {"pool": {"address": "mooncake://127.0.0.1:1"}}
    assert len(said) == 1
    assert "mooncake://127.0.0.1:1: no master answers" in said[0]

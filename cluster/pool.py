"""The master of the cluster-wide pool: this endpoint's own, kept alive, or one that others run."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forebay.cluster.config import EndpointConfig, worker_config
from forebay.cluster.start_checks import StartError
from forebay.kvstore.pool_address import PoolError, parse
from forebay.kvstore.pool_client import reach
from forebay.kvstore.pool_master import KeptMaster

LOG = "mooncake_master.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """`config`: with the master's address in it. `master` None: another one's, or there is no pool."""

    config: EndpointConfig
    master: KeptMaster | None = None

    def about(self) -> dict[str, Any]:
        """For `forebay status`."""
        address = worker_config(self.config, "prefill", "").store.pool
        own = {} if self.master is None else {"master_pid": self.master.pid, "restarts": self.master.restarts}
        return {} if address is None else {"pool": {"address": address, **own}}


@contextlib.contextmanager
def pool(config: EndpointConfig, run_path: Path, say: Callable[[str], None]) -> Iterator[Pool]:
    """Until the block ends. Raises StartError where a master of one's own does not start."""
    store = worker_config(config, "prefill", "").store
    if store.pool is None:
        yield Pool(config=config)
    elif (address := parse(store.pool)) is not None:
        try:
            reach(address)
        except PoolError as error:  # its clients join when it comes, and miss until then
            say(f"{error}; serving without it meanwhile")
        yield Pool(config=config)
    else:
        try:
            master = KeptMaster(offload=store.pool_ssd_path is not None, log=run_path / LOG)
            with master:
                say(f"Mooncake Store: master at {master.address}")
                made = replace(config, store={**config.store, "pool": str(master.address)})
                yield Pool(config=made, master=master)
        except PoolError as error:
            raise StartError(str(error)) from None

"""How each kind of worker is built, as functions that can be sent to the process where that happens."""

from typing import Any

from forebay.cluster.beat import Kind
from forebay.workers.config import WorkerConfig


def make_prefill(config: WorkerConfig, name: str) -> Any:
    from forebay.cluster.build import build_prefill

    return build_prefill(config, name)


def make_decode(config: WorkerConfig, name: str) -> Any:
    from forebay.cluster.build import build_decode

    return build_decode(config, name)


MAKERS: dict[Kind, Any] = {"prefill": make_prefill, "decode": make_decode}

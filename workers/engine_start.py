"""From starting a process to its first token: imports, random weights, what is compiled or captured, one prompt.

`python -m forebay.workers.engine_start SHAPE DEVICE` is that process; it says on stdout when the token is there.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import torch

from forebay.kernels.shapes import ModelShape
from forebay.ops.bench_report import Row
from forebay.workers.engine_make import make_engine
from forebay.workers.engine_plan import VLLM_START_S, Mode, plan_for, published, shape_of
from forebay.workers.made_contexts import empty_contexts

TIMEOUT_S = 300.0


def start_rows(shape: ModelShape, mode: Mode, device: str) -> Iterator[Row]:
    """Twice: with Triton's cache empty, then with what the first left in it."""
    with tempfile.TemporaryDirectory(prefix="forebay-triton-") as cache:
        for which, what in (("cold", "compile caches empty"), ("warm", "compile caches filled")):
            taken = _seconds(shape.name, mode, device, cache)
            reference = published(shape, VLLM_START_S[which])
            yield Row(name=f"start to first token, {what}, {mode}", value=taken, unit="s", reference=reference)


def _seconds(shape: str, mode: Mode, device: str, cache: str) -> float:
    """Until the child says that its token is there. CalledProcessError where it never does."""
    command = [sys.executable, "-m", __name__, shape, mode, device]
    before = time.perf_counter()
    ran = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TRITON_CACHE_DIR": cache})
    with ran:
        assert ran.stdout is not None
        told = ran.stdout.readline()
        taken = time.perf_counter() - before
        code = ran.wait(TIMEOUT_S)
    if code != 0 or not told:
        raise subprocess.CalledProcessError(code, command)
    return taken


def main(name: str, mode: Mode, device_type: str) -> int:
    if device_type == "cpu":
        torch.set_num_threads(1)
    shape, plan, device = shape_of(name), plan_for(device_type, mode), torch.device(device_type)
    engine = make_engine(mode, shape, plan, device)
    ids = torch.randint(0, shape.vocab, (plan.start,), generator=torch.Generator().manual_seed(0)).to(device)
    token = engine.prefill(empty_contexts(engine.layout, device, 1, plan.start), ids, 0)
    print(f"first token {token}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))  # type: ignore[arg-type]

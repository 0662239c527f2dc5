"""Builds a worker in the process that it will live in. Imported late: this is where torch and the model come in."""

import sys

from forebay.kvstore.arena import Arena, sweep
from forebay.workers.config import WorkerConfig
from forebay.workers.decode import DecodeWorker
from forebay.workers.load import load
from forebay.workers.prefill import PrefillWorker


def build_prefill(config: WorkerConfig, name: str) -> PrefillWorker:
    # A worker that was killed could not remove its arenas; who takes its place does.
    sweep(config.store.run_dir)
    worker = PrefillWorker(
        load(config), config, Arena(config.store.run_dir, f"handoff-{name}", config.store.handoff_bytes)
    )
    if worker.memory.ssd_failure is not None:
        print(f"forebay: {name}: no SSD tier: {worker.memory.ssd_failure}", file=sys.stderr, flush=True)
    return worker


def build_decode(config: WorkerConfig, name: str) -> DecodeWorker:
    return DecodeWorker(load(config), config)

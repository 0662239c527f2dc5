"""Trains the built-in model: from a file of token rows to the weights of an ordinary model folder.

    python -m forebay.workers.train --data corpus.npz --folder DIR --steps N | --seconds S

DIR has config.json; model.safetensors, loss.json, scores.json and (where matplotlib is there) loss.png go to it. A
run given `--checkpoint FILE` saves itself there and goes on from there. Stages (row length, batch, sparse or dense)
are shares of the whole run; the order of rows is a function of the seed.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forebay.kernels.shapes import ModelShape
from forebay.workers import train_balance, train_check, train_data, train_weights
from forebay.workers.hf_config import read_config
from forebay.workers.train_optimizer import Optimizer
from forebay.workers.train_plot import draw
from forebay.workers.train_step import Step, trainable

WARM_UP_STEPS, COOL_FROM = 40, 0.4
LOG_EVERY = 20


@dataclass(frozen=True, slots=True)
class Stage:
    """Rows `name` of the file, `batch` at a time, until this share of the run is over."""

    name: str
    batch: int
    until: float
    sparse: bool = False


STAGES = (Stage("short", 48, 0.72), Stage("long", 16, 1.0, sparse=True))


def read_stage(text: str) -> Stage:
    """A stage written as name:batch:until, with :sparse behind where it is."""
    name, batch, until, *mode = text.split(":")
    if mode not in ([], ["sparse"]):
        raise ValueError(f"{text}: a stage ends with its share, or with :sparse")
    return Stage(name, int(batch), float(until), bool(mode))


def rate(share: float, step: int) -> float:
    """The learning rate's factor at a step, when `share` of the run is over: up, level, then straight down."""
    return min(1.0, (step + 1) / WARM_UP_STEPS, max(0.0, (1.0 - share) / (1.0 - COOL_FROM)))


@dataclass(slots=True)
class Clock:
    """How much of the run is over: by steps, or by seconds since its start (those of earlier parts counted in)."""

    steps: int | None
    seconds: float | None
    spent_s: float = 0.0
    started_s: float = 0.0

    def start(self) -> None:
        self.started_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return self.spent_s + time.monotonic() - self.started_s

    def share(self, step: int) -> float:
        if self.steps is not None:
            return step / self.steps
        assert self.seconds is not None
        return self.elapsed_s / self.seconds


class Run:
    """A training run; `parameters` and the optimiser's state are all that it carries from step to step."""

    def __init__(
        self,
        shape: ModelShape,
        parameters: train_weights.Parameters,
        file: Any,
        stages: Sequence[Stage],
        seed: int,
        peak: float = 1.0,
    ) -> None:
        self.shape, self.parameters, self.file = shape, parameters, file
        self.stages, self.seed, self.peak = stages, seed, peak
        self.optimizer = Optimizer(parameters)
        self.step = 0
        self.log: list[dict[str, float]] = []

    def save(self, path: Path, clock: Clock) -> None:
        state = {f"parameter.{name}": value for name, value in self.parameters.items()} | self.optimizer.state()
        whole = {"state": state, "step": self.step, "spent_s": clock.elapsed_s, "log": self.log}
        torch.save(whole, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)

    def load(self, path: Path, clock: Clock) -> None:
        whole = torch.load(path, map_location=next(iter(self.parameters.values())).device, weights_only=True)
        for name, value in self.parameters.items():
            value.copy_(whole["state"][f"parameter.{name}"])
        self.optimizer.load(whole["state"])
        self.step, clock.spent_s, self.log = whole["step"], whole["spent_s"], whole["log"]

    def train(self, clock: Clock) -> Iterator[int]:
        """Runs to the end; yields the number of every finished step."""
        clock.start()
        for stage in self.stages:
            if clock.share(self.step) < stage.until:
                yield from self._stage(stage, clock)
                print(f"stage {stage.name} ends at step {self.step}, {clock.elapsed_s:.0f} s", flush=True)

    def _stage(self, stage: Stage, clock: Clock) -> Iterator[int]:
        device = self.parameters["lm_head.weight"].device
        rows = train_data.load_rows(self.file, stage.name, stage.batch, self.seed, device)
        step = Step(self.shape, self.parameters, self.optimizer, rows.inputs, sparse=stage.sparse)
        while (share := clock.share(self.step)) < stage.until:
            rows.take(self.step)
            self.optimizer.rate.fill_(self.peak * rate(share, self.step))
            step()
            self.step += 1
            if self.step % LOG_EVERY == 0:
                self._record(step, stage, rows.inputs.ids.numel(), clock)
            yield self.step

    def _record(self, step: Step, stage: Stage, tokens: int, clock: Clock) -> None:
        now_s = clock.elapsed_s
        before = self.log[-1] if self.log else {"step": 0, "s": 0.0}
        speed = tokens * (self.step - before["step"]) / max(now_s - before["s"], 1e-9)
        row = {"step": self.step, "s": now_s, "loss": float(step.loss), "index": float(step.index_loss)}
        self.log.append(row | {"load": float(step.load)})
        print(
            f"{stage.name} step {self.step} · {now_s:.0f} s · {clock.share(self.step):.0%} · loss {row['loss']:.4f} · "
            f"index {row['index']:.3f} · load {float(step.load):.2f} · {speed / 1e3:.0f}k tokens/s",
            flush=True,
        )


def check(run: Run, batch: int) -> dict[str, float]:
    """Scores on the file's kept rows."""
    shape, parameters, file = run.shape, run.parameters, run.file
    bits, load = train_check.bits_per_byte(shape, parameters, file, batch)
    return {
        "answers": train_check.answers(shape, parameters, file, "check_lessons", batch, sparse=True),
        "needles": train_check.answers(shape, parameters, file, "check_needles", max(1, batch // 16), sparse=True),
        "bits_per_byte": bits,
        "expert_load": load,
    }


def finish(run: Run, folder: Path) -> None:
    """Weights, the loss as numbers and as a picture, and the scores of what was written, not of what was trained."""
    train_weights.write(run.parameters, folder)
    (folder / "loss.json").write_text(json.dumps(run.log), encoding="utf-8")
    draw(run.log, folder / "loss.png")
    device = run.parameters["lm_head.weight"].device
    run.parameters = train_weights.read(run.shape, folder, device)
    train_balance.settle(run.shape, run.parameters, run.file, batch=64)
    train_weights.write(run.parameters, folder)
    scores = check(run, batch=64)
    (folder / "scores.json").write_text(json.dumps(scores), encoding="utf-8")
    print(json.dumps(scores))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--steps", type=int)
    length.add_argument("--seconds", type=float)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--checkpoint-steps", type=int, default=500)
    parser.add_argument("--stages", type=read_stage, nargs="+", default=STAGES, metavar="NAME:BATCH:UNTIL[:sparse]")
    parser.add_argument("--peak", type=float, default=1.0, help="what the learning rates are multiplied by")
    parser.add_argument("--from-folder", type=Path, help="begin with the weights of this model folder")
    parser.add_argument("--seed", type=int, default=31)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.backends.cuda.matmul.allow_tf32 = True
    shape = read_config(args.folder).shape
    first = args.from_folder and train_weights.read(shape, args.from_folder, device)
    first = first or train_weights.start(shape, args.seed, device)
    run = Run(shape, first, train_data.open_file(args.data), args.stages, args.seed, args.peak)
    clock = Clock(args.steps, args.seconds)
    if args.checkpoint is not None and args.checkpoint.is_file():
        run.load(args.checkpoint, clock)
    with trainable(device):
        for step in run.train(clock):
            if args.checkpoint is not None and step % args.checkpoint_steps == 0:
                run.save(args.checkpoint, clock)
    finish(run, args.folder)


if __name__ == "__main__":
    main()

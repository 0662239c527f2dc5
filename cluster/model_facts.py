"""What the router must know of a model, read in a process of its own: it takes torch, which the launcher does without.

`python -m forebay.cluster.model_facts MODEL BLOCK_TOKENS` makes a built-in model's folder where it is missing, checks
config and tensor headers, and prints one JSON object; or one line on stderr, with status 2, where the folder is wrong.
"""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """`token_bytes`: rows and index keys of one token over all layers; `state_bytes`: one sequence's states.

    `temperature` and `top_p`: what the folder's generation_config.json advises, 1 where it is silent.
    `least_bytes`: the pages of a sequence of one block, less than which no worker can do anything with.
    """

    folder: str
    context_tokens: int
    block_tokens: int
    token_bytes: int
    state_bytes: int
    least_bytes: int
    weight_bytes: int
    temperature: float
    top_p: float


class ModelError(Exception):
    """The folder cannot be served: one line says why."""


class FactsReader:
    """Reads in the background: `start`, then `wait`."""

    def __init__(self, model: str, block_tokens: int) -> None:
        command = [sys.executable, "-m", "forebay.cluster.model_facts", model, str(block_tokens)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def wait(self) -> ModelFacts:
        out, errors = self.process.communicate()
        if self.process.returncode:
            lines = errors.strip().splitlines() or [f"reading the model failed with status {self.process.returncode}"]
            raise ModelError(lines[-1])
        return ModelFacts(**json.loads(out))


def read_facts(model: str, block_tokens: int) -> ModelFacts:
    """Raises FolderError. Takes no memory for weights."""
    import torch

    from forebay.workers.demo import resolve
    from forebay.workers.hf_config import read_config
    from forebay.workers.model import model_layout
    from forebay.workers.weights import check_folder

    folder = resolve(model)
    config = read_config(folder)
    checked = check_folder(folder, config.shape, config.mtp_layers)
    layout = model_layout(config.shape, block_tokens, torch.float32)
    return ModelFacts(
        folder=str(folder),
        context_tokens=config.shape.context_tokens,
        block_tokens=block_tokens,
        token_bytes=sum(group.row_bytes * len(group.layers) for group in layout.paged),
        state_bytes=sum(group.state_bytes * len(group.layers) for group in layout.states),
        least_bytes=layout.page_bytes * (layout.state_pages + layout.pages_for(block_tokens)),
        weight_bytes=sum(file.stat().st_size for file in checked.files),
        **_advice(folder),
    )


def _advice(folder: Path) -> dict[str, float]:
    """Raises FolderError where a number is none, or out of range."""
    from forebay.workers.config_fields import FolderError

    path = folder / "generation_config.json"
    try:
        advised = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        found = {"temperature": float(advised.get("temperature", 1.0)), "top_p": float(advised.get("top_p", 1.0))}
    except (ValueError, TypeError, AttributeError) as error:
        raise FolderError(f"{path}: {error}") from error
    if not (0 <= found["temperature"] <= 2 and 0 < found["top_p"] <= 1):
        raise FolderError(f"{path}: temperature lies in 0 to 2 and top_p above 0 up to 1, not {found}")
    return found


def main(model: str, block_tokens: str) -> int:
    from forebay.workers.config_fields import FolderError

    try:
        facts = read_facts(model, int(block_tokens))
    except FolderError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(asdict(facts)))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

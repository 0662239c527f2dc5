"""The loss curve as a picture. Needs matplotlib, which is no dependency of the package: without it, no picture."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path


def draw(log: Sequence[dict[str, float]], path: Path) -> bool:
    """Loss and indexer loss over seconds as a PNG; False where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure  # type: ignore[import-not-found]

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, label in (("loss", "weighted cross entropy"), ("index", "indexer: KL")):
        axes.plot([row["s"] for row in log], [row[name] for row in log], label=label, linewidth=1)
    axes.set_xlabel("seconds")
    axes.set_yscale("log")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    return True

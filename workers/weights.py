"""A folder of safetensors files, sharded or not, checked against a `ModelShape` by its headers alone, then read.

`check_folder` takes no memory for weights: names, shapes and dtypes stand in the headers, and all that is wrong is
one error. `CheckedFolder.tensor` then reads single tensors, so that a loader never holds a second copy of the model.
"""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forebay.kernels.shapes import ModelShape
from forebay.workers.config_fields import FolderError
from forebay.workers.tensor_table import TensorSpec, expected_tensors, unused_part

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
PREFIX = "language_model."
NAMED_AT_MOST = 3


@dataclass(frozen=True, slots=True)
class Header:
    """Where a tensor stands and what its file's header says of it."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]


class CheckedFolder:
    """Tensors by their name without prefix. `skipped` counts those of parts that are known and not used, by part."""

    def __init__(self, found: dict[str, Header], skipped: Counter[str]) -> None:
        self.found, self.skipped = found, skipped
        self._open: dict[Path, Any] = {}

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor `name` as stored, or cast to `dtype`. FolderError where the file has changed since the check."""
        header = self.found[name]
        try:
            if header.file not in self._open:
                self._open[header.file] = safe_open(header.file, framework="pt")
            tensor: Tensor = self._open[header.file].get_tensor(header.name)
        except (SafetensorError, OSError) as error:
            raise FolderError(f"{header.file}: cannot read {header.name}: {error}") from None
        return tensor if dtype is None else tensor.to(dtype)

    @property
    def files(self) -> list[Path]:
        return sorted({header.file for header in self.found.values()})

    def skipped_line(self) -> str:
        """One line for the log: what stands in the folder and is not used."""
        parts = ", ".join(f"{count} of {part}" for part, count in sorted(self.skipped.items()))
        return f"tensors known and not used: {parts or 'none'}"


def check_folder(folder: Path, shape: ModelShape, mtp_layers: int = 0) -> CheckedFolder:
    """Compare the headers with what `shape` needs. One FolderError names unknown, missing and ill-formed tensors."""
    stored = read_headers(folder)
    prefix = PREFIX if any(name.startswith(PREFIX + "model.") for name in stored) else ""
    named = {name.removeprefix(prefix): header for name, header in stored.items()}
    expected = expected_tensors(shape)
    found = {name: _pick(name, spec, named) for name, spec in expected.items()}
    taken = {header.name for header in found.values() if header is not None}
    rest = [name for name, header in named.items() if header.name not in taken]
    parts = {name: unused_part(name, shape, mtp_layers) for name in rest}
    complaints = _complaints(
        unknown=[named[name].name for name, part in parts.items() if part is None],
        missing=[prefix + name for name, header in found.items() if header is None],
        ill_formed=[_mismatch(h, expected[name]) for name, h in found.items() if h and not _fits(h, expected[name])],
    )
    if complaints:
        raise FolderError(f"{folder}: {'; '.join(complaints)}")
    present = {name: header for name, header in found.items() if header is not None}
    return CheckedFolder(present, Counter(part for part in parts.values() if part is not None))


def read_headers(folder: Path) -> dict[str, Header]:
    """Every tensor's header, by stored name. FolderError on an unreadable file or an index that does not match."""
    index = folder / INDEX_FILE
    if index.is_file():
        return _sharded(folder, index)
    if not (folder / SINGLE_FILE).is_file():
        raise FolderError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE}")
    return _file_headers(folder / SINGLE_FILE)


def _sharded(folder: Path, index: Path) -> dict[str, Header]:
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = {str(shard) for shard in places.values()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise FolderError(f"{index}: cannot be read: {error!r}") from None
    absent = sorted(shard for shard in shards if Path(shard).name != shard or not (folder / shard).is_file())
    if absent:
        raise FolderError(f"{folder}: {_listed('missing shard', absent)}")
    stored: dict[str, Header] = {}
    for shard in sorted(shards):
        for name, header in _file_headers(folder / shard).items():
            if places.get(name) == shard:
                stored[name] = header
            elif name not in places:
                raise FolderError(f"{folder / shard}: holds {name}, which {INDEX_FILE} does not list")
    lost = sorted(name for name in places if name not in stored)
    if lost:
        raise FolderError(f"{folder}: {_listed('listed tensor not in its shard', lost)}")
    return stored


def _file_headers(file: Path) -> dict[str, Header]:
    try:
        with safe_open(file, framework="pt") as opened:
            slices = ((name, opened.get_slice(name)) for name in opened.keys())  # noqa: SIM118 (not a dict)
            return {n: Header(file, n, s.get_dtype(), tuple(s.get_shape())) for n, s in slices}
    except (SafetensorError, OSError) as error:
        raise FolderError(f"{file}: is not a whole safetensors file: {error}") from None


def _pick(name: str, spec: TensorSpec, named: dict[str, Header]) -> Header | None:
    return next((named[known] for known in (name, *spec.aliases) if known in named), None)


def _fits(header: Header, spec: TensorSpec) -> bool:
    return header.shape in spec.shapes and header.dtype in spec.dtypes


def _mismatch(header: Header, spec: TensorSpec) -> str:
    shapes = " or ".join(str(list(dims)) for dims in dict.fromkeys(spec.shapes))
    return f"{header.name} is {header.dtype}{list(header.shape)}, not {'/'.join(spec.dtypes)}{shapes}"


def _complaints(unknown: list[str], missing: list[str], ill_formed: list[str]) -> list[str]:
    named = (("unknown tensor", unknown), ("missing tensor", missing), ("wrong shape or dtype", ill_formed))
    return [_listed(what, names) for what, names in named if names]


def _listed(what: str, names: Iterable[str]) -> str:
    ordered = list(names)
    more = len(ordered) - NAMED_AT_MOST
    return f"{len(ordered)} x {what}: {', '.join(ordered[:NAMED_AT_MOST])}" + (f" and {more} more" if more > 0 else "")

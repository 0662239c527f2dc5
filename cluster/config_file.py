"""The TOML file and the flags become one `EndpointConfig`; whatever is wrong is named by key before anything starts."""

import difflib
import tomllib
import types
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from forebay.cluster.config import KINDS, EndpointConfig, router_config, worker_config
from forebay.kvstore.config import StoreConfig
from forebay.router.config import ModelConfig, RouterConfig
from forebay.workers.config import WorkerConfig

TABLES: dict[str, tuple[type, frozenset[str]]] = {
    "workers": (WorkerConfig, frozenset({"model", "store", "device", "mode"})),
    "store": (StoreConfig, frozenset({"run_dir", "cluster", "rank", "ranks"})),
    "router": (RouterConfig, frozenset({"host", "port", "clusters", "model"})),
}
"""Each table's dataclass, and the fields of it that are no keys."""


class ConfigError(Exception):
    """Says everything that is wrong, one line a fault."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


def load(path: Path | None, flags: Mapping[str, Any]) -> EndpointConfig:
    """The file's keys, with the flags that were given in their place; a flag `table.key` is a key of that table."""
    raw = _merged({} if path is None else _read(path), flags)
    where = "" if path is None else f"{path}: "
    faults: list[str] = []
    values = dict(_converted(raw, EndpointConfig, frozenset(), "", faults))
    for name, (table, reserved) in TABLES.items():
        if isinstance(raw.get(name), Mapping):
            values[name] = dict(_converted(raw[name], table, reserved, f"[{name}] ", faults))
    if not faults:
        try:
            return _checked(EndpointConfig(**values))
        except (AssertionError, ValueError) as error:
            faults.append(str(error))
    raise ConfigError([where + fault for fault in faults])


def show(config: EndpointConfig) -> Iterator[str]:
    """Every key with its value, tables last, defaults included."""
    for each in fields(config):
        if each.name not in TABLES and getattr(config, each.name) is not None:
            yield f"{each.name} = {_toml(getattr(config, each.name))}"
    worker = worker_config(config, "prefill", "")
    made = {"workers": worker, "store": worker.store, "router": router_config(config, _stand_in(config))}
    for name, value in made.items():
        yield f"\n[{name}]"
        for each in fields(value):  # type: ignore[arg-type]
            if each.name not in TABLES[name][1] and getattr(value, each.name) is not None:
                yield f"{each.name} = {_toml(getattr(value, each.name))}"


def _merged(file: dict[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    raw = dict(file)
    for flag, value in flags.items():
        table, dot, key = flag.partition(".")
        if not dot:
            raw[flag] = value
        elif isinstance(raw.setdefault(table, {}), Mapping):
            raw[table] = {**raw[table], key: value}
    return raw


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}"]) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: not TOML: {error}"]) from None


def _converted(
    raw: Mapping[str, Any], target: type, reserved: frozenset[str], where: str, faults: list[str]
) -> Iterator[tuple[str, Any]]:
    known = {name: hint for name, hint in get_type_hints(target).items() if name not in reserved}
    for key, value in raw.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            faults.append(f"{where}{key}: no such key" + (f" (did you mean {close[0]}?)" if close else ""))
            continue
        faults += [f"{where}{key}: {fault}" for fault in _unknown_keys(value, known[key])]
        try:
            yield key, msgspec.convert(value, known[key])
        except (msgspec.ValidationError, AssertionError) as error:
            faults.append(f"{where}{key}: {error}")


def _unknown_keys(value: Any, hint: Any) -> Iterator[str]:
    """Keys, at any depth, that the dataclasses in `hint` do not have: conversion alone would drop them."""
    if get_origin(hint) in (Union, types.UnionType, tuple):
        for part in get_args(hint):
            yield from _unknown_keys(value, part)
    elif is_dataclass(hint) and isinstance(value, list):
        for item in value:
            yield from _unknown_keys(item, hint)
    elif is_dataclass(hint) and isinstance(value, Mapping):
        hints = get_type_hints(hint)
        for key in value:
            if key not in hints:
                yield f"{key}: no such key"
            else:
                yield from _unknown_keys(value[key], hints[key])


def _checked(config: EndpointConfig) -> EndpointConfig:
    """Builds what each room would be given, so that their own checks speak now."""
    shares = [share for kind in KINDS for share in worker_config(config, kind, "").store.classes]
    known = [each.name for each in router_config(config, _stand_in(config)).classes]
    for share in shares:
        assert share.name in known, f"[store] classes: {share.name}: no class of [router] ({', '.join(known)})"
    return config


def _stand_in(config: EndpointConfig) -> ModelConfig:
    """The model is read when the endpoint starts; until then its sizes are not known."""
    return ModelConfig(
        name=config.model_name, folder="", context_tokens=1, block_tokens=1, token_bytes=1, state_bytes=1
    )


def _toml(value: Any) -> str:
    if is_dataclass(value) and not isinstance(value, type):
        pairs = ((each.name, getattr(value, each.name)) for each in fields(value))
        # A key's secret stays in its file: what is printed here ends up in terminals and tickets.
        shown = ((name, "..." if name == "secret" else item) for name, item in pairs if item is not None)
        return "{ " + ", ".join(f"{name} = {_toml(item)}" for name, item in shown) + " }"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return repr(value)

"""A recorded load as paths in a forest, so that a replay touches a few nodes a request instead of thousands of blocks.

A node is a longest run of blocks that no request of the load ends in or leaves: whoever has its first block on its
path has all of it. Names of blocks are chained, so a block has one parent; a session's names mean nothing elsewhere.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Names = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lookup:
    """One recorded look-up. `blocks` int64 >= 0 names the prompt's blocks within `scope`; `session` None: unknown."""

    at: float
    scope: Hashable
    blocks: Names
    input_tokens: int
    session: str | None = None
    stop: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """A look-up as nodes from the root on."""

    at: float
    session: str | None
    stop: str
    input_tokens: int
    n_blocks: int
    path: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """`n_blocks`, `parents` (-1: none) and `ends` (blocks from the root to its end) of each node."""

    block_tokens: int
    accesses: tuple[Access, ...]
    n_blocks: tuple[int, ...]
    parents: tuple[int, ...]
    ends: tuple[int, ...]


def plant(
    lookups: Sequence[Lookup], block_tokens: int, cuts: Callable[[Lookup], Sequence[int]] = lambda _: ()
) -> Forest:
    """The forest of a load. `cuts`: where nodes end too, in blocks of the prompt from its start."""
    scopes: dict[Hashable, list[int]] = {}
    for i, lookup in enumerate(lookups):
        scopes.setdefault(lookup.scope, []).append(i)
    made = _Planting()
    paths: dict[int, tuple[int, ...]] = {}
    for chosen in scopes.values():
        prompts = [lookups[i].blocks for i in chosen]
        named = [lookups[i].blocks[np.array(cuts(lookups[i]), np.int64) - 1] for i in chosen]
        found = made.add_scope(prompts, np.concatenate(named))
        paths.update(zip(chosen, found, strict=True))
    return Forest(
        block_tokens=block_tokens,
        accesses=tuple(_access(lookup, paths[i]) for i, lookup in enumerate(lookups)),
        n_blocks=tuple(made.n_blocks),
        parents=tuple(made.parents),
        ends=tuple(made.ends),
    )


def _access(lookup: Lookup, path: tuple[int, ...]) -> Access:
    return Access(
        at=lookup.at,
        session=lookup.session,
        stop=lookup.stop,
        input_tokens=lookup.input_tokens,
        n_blocks=len(lookup.blocks),
        path=path,
    )


class _Planting:
    def __init__(self) -> None:
        self.n_blocks: list[int] = []
        self.parents: list[int] = []
        self.ends: list[int] = []

    def add_scope(self, prompts: Sequence[Names], cut_names: Names) -> list[tuple[int, ...]]:
        is_end = _node_ends(prompts)
        is_end[cut_names] = True
        nodes: dict[int, int] = {}
        found = []
        for prompt in prompts:
            at = np.flatnonzero(is_end[prompt])
            found.append(self._path(nodes, prompt[at].tolist(), (at + 1).tolist()))
        return found

    def _path(self, nodes: dict[int, int], names: list[int], ends: list[int]) -> tuple[int, ...]:
        path: list[int] = []
        for name, end in zip(names, ends, strict=True):
            if name not in nodes:
                parent = path[-1] if path else -1
                nodes[name] = len(self.n_blocks)
                self.n_blocks.append(end - (self.ends[parent] if path else 0))
                self.parents.append(parent)
                self.ends.append(end)
            path.append(nodes[name])
        return tuple(path)


def _node_ends(prompts: Sequence[Names]) -> npt.NDArray[np.bool_]:
    """For each name whether a request ends there, or two go on differently from there."""
    names = 1 + max((int(prompt.max()) for prompt in prompts if len(prompt)), default=-1)
    pairs = [prompt[:-1] * names + prompt[1:] for prompt in prompts if len(prompt)]
    parents = np.unique(np.concatenate(pairs)) // names if pairs else np.empty(0, np.int64)
    ends = np.bincount(parents, minlength=names) > 1
    ends[[int(prompt[-1]) for prompt in prompts if len(prompt)]] = True
    return ends

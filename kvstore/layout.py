"""How tokens and states lie in pages. Pure arithmetic; every size comes from here.

All pages have one size. A page holds `page_tokens` rows of one layer of a paged group, or one layer's state:

    latent page    | row of token 0 | row 1 | ... | row page_tokens - 1 |
    index page     | key of token 0 | key 1 | ... | key page_tokens - 1 | padding |
    state page     | one KDA layer's state (recurrent matrices, then convolution tail) | padding |

`page_tokens` of the latent group is the smallest multiple of the block whose bytes hold one layer's state (and one
block of index keys), so the state page carries the padding. Index keys are smaller: their pages cover more tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

LATENT = "latent"
INDEX = "index"


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedGroup:
    """Rows that grow with length. A span of `page_tokens` tokens takes one page per layer.

    `together`: so many tokens' rows share their bytes in an order of their own, and are copied all or none; a block
    holds a whole number of them.
    """

    name: str
    layers: tuple[int, ...]
    row_bytes: int
    page_tokens: int
    together: int = 1

    def bytes_of(self, n_tokens: int) -> int:
        """Of one layer, what holds the rows of `n_tokens` tokens."""
        return -(-n_tokens // self.together) * self.together * self.row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StateGroup:
    """KDA layers at one place between two global layers. One state takes one page per layer."""

    name: str
    layers: tuple[int, ...]
    state_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The pages of one model. Groups have distinct names; `paged[0]` is the latent group."""

    block_tokens: int
    page_bytes: int
    paged: tuple[PagedGroup, ...]
    states: tuple[StateGroup, ...]

    def pages_for(self, n_tokens: int) -> int:
        """Pages that the rows of `n_tokens` tokens take over all paged groups."""
        return sum(-(-n_tokens // group.page_tokens) * len(group.layers) for group in self.paged)

    @property
    def state_pages(self) -> int:
        """Pages of one sequence's whole state, all KDA layers."""
        return sum(len(group.layers) for group in self.states)

    @property
    def state_bytes(self) -> int:
        """Bytes of one layer's state."""
        return self.states[0].state_bytes if self.states else 0

    @property
    def padding(self) -> float:
        """The share of a state page that holds nothing (0 where the model has no states)."""
        return 1 - self.state_bytes / self.page_bytes if self.states else 0.0

    @property
    def signature(self) -> str:
        """Text that differs whenever a byte would lie elsewhere in a row, a state or a block; part of a fingerprint."""
        paged = ";".join(f"{group.name}:{group.layers}:{group.row_bytes}" for group in self.paged)
        states = ";".join(f"{group.name}:{group.layers}:{group.state_bytes}" for group in self.states)
        return f"block={self.block_tokens} {paged} {states}"


def make_layout(
    *,
    block_tokens: int,
    global_layers: Sequence[int],
    kda_layers: Sequence[int],
    latent_row_bytes: int,
    index_row_bytes: int | None,
    state_bytes: int,
    index_together: int = 1,
) -> Layout:
    """The layout of a model from its layers and the bytes of one layer's row, index key and state."""
    assert block_tokens % index_together == 0, "a block ends where rows that lie together do"
    page_tokens = _page_tokens(block_tokens, latent_row_bytes, max(state_bytes, (index_row_bytes or 0) * block_tokens))
    page_bytes = page_tokens * latent_row_bytes
    layers = tuple(global_layers)
    paged = [PagedGroup(name=LATENT, layers=layers, row_bytes=latent_row_bytes, page_tokens=page_tokens)]
    if index_row_bytes is not None:
        index_tokens = page_bytes // index_row_bytes // block_tokens * block_tokens
        paged.append(
            PagedGroup(
                name=INDEX,
                layers=layers,
                row_bytes=index_row_bytes,
                page_tokens=index_tokens,
                together=index_together,
            )
        )
    return Layout(
        block_tokens=block_tokens,
        page_bytes=page_bytes,
        paged=tuple(paged),
        states=_state_groups(global_layers, kda_layers, state_bytes),
    )


def _page_tokens(block_tokens: int, row_bytes: int, least_bytes: int) -> int:
    return block_tokens * max(1, -(-least_bytes // (block_tokens * row_bytes)))


def _state_groups(global_layers: Sequence[int], kda_layers: Sequence[int], state_bytes: int) -> tuple[StateGroup, ...]:
    """Group the KDA layers by how far each lies behind the global layer before it."""
    is_global = set(global_layers)
    places: dict[int, list[int]] = {}
    for layer in sorted(kda_layers):
        place = 0
        while layer - place - 1 >= 0 and layer - place - 1 not in is_global:
            place += 1
        places.setdefault(place, []).append(layer)
    return tuple(
        StateGroup(name=f"kda{place}", layers=tuple(layers), state_bytes=state_bytes)
        for place, layers in sorted(places.items())
    )

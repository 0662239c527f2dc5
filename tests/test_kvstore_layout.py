"""Page sizes of known models, and the groups that a model's layers fall into."""

import pytest

from forebay.kvstore.layout import Layout, make_layout

ROW_BYTES = 576 * 2
STATE_BYTES = 96 * 128 * 128 * 4 + 3 * 3 * 96 * 128 * 2
GLOBALS = (*range(3, 92, 4), 92)
KDA = tuple(layer for layer in range(93) if layer not in GLOBALS)


def k3(tp: int = 1, index_row_bytes: int | None = None) -> Layout:
    """K3: bf16 rows shared by all ranks, fp32 states and bf16 tails split by head."""
    return make_layout(
        block_tokens=512,
        global_layers=GLOBALS,
        kda_layers=KDA,
        latent_row_bytes=ROW_BYTES,
        index_row_bytes=index_row_bytes,
        state_bytes=STATE_BYTES // tp,
    )


@pytest.mark.parametrize(
    ("tp", "tokens", "padding"), [(1, 6144, 0.08), (2, 3072, 0.08), (4, 1536, 0.08), (8, 1024, 0.31)]
)
def test_k3_page_sizes(tp: int, tokens: int, padding: float) -> None:
    layout = k3(tp)
    assert layout.paged[0].page_tokens == tokens
    assert layout.page_bytes == tokens * ROW_BYTES
    assert layout.padding == pytest.approx(padding, abs=0.005)


def test_k3_groups_by_place_in_the_period() -> None:
    layout = k3(index_row_bytes=132)
    assert [(group.name, len(group.layers)) for group in layout.states] == [("kda0", 23), ("kda1", 23), ("kda2", 23)]
    assert layout.states[1].layers[:3] == (1, 5, 9)
    assert [(group.name, len(group.layers), group.page_tokens) for group in layout.paged] == [
        ("latent", 24, 6144),
        ("index", 24, 53248),
    ]
    assert layout.state_pages == 69
    assert layout.pages_for(6145) == 2 * 24 + 24


def test_kimi_linear_ends_with_a_short_period() -> None:
    """27 layers, globals 4, 8, ... 24, 27 counting from 1: the last period lacks its third KDA layer."""
    layout = make_layout(
        block_tokens=512,
        global_layers=(3, 7, 11, 15, 19, 23, 26),
        kda_layers=[layer for layer in range(26) if layer % 4 != 3],
        latent_row_bytes=ROW_BYTES,
        index_row_bytes=None,
        state_bytes=2 << 20,
    )
    assert [len(group.layers) for group in layout.states] == [7, 7, 6]


def test_a_page_holds_a_block_of_every_group() -> None:
    layout = make_layout(
        block_tokens=16, global_layers=(1,), kda_layers=(0,), latent_row_bytes=8, index_row_bytes=100, state_bytes=4
    )
    assert all(group.page_tokens >= 16 for group in layout.paged)
    assert layout.page_bytes >= 16 * 100


def test_signature_ignores_the_page_size() -> None:
    assert k3(1).signature == k3(1).signature
    assert k3(1).signature != k3(2).signature
    assert k3(1).signature != k3(1, index_row_bytes=132).signature

"""The published figures of K3 and K3.1 Pro follow from the shape table."""

import pytest

from forebay.kernels import costs
from forebay.kernels.models import K3, K3_1_PRO, KIMI_LINEAR_48B, SHAPES

PUBLISHED = {
    "layers": (93, "layers"),
    "KDA layers": (69, "layers"),
    "global layers": (24, "layers"),
    "MoE layers": (92, "layers"),
    "experts per chosen expert": (56, "×"),
    "state, bf16": (207.0, "MiB/sequence"),
    "state, fp32": (414.0, "MiB/sequence"),
    "convolution tails, bf16": (14.55, "MiB/sequence"),
    "latent row, bf16": (1152, "B/token/layer"),
    "latent rows": (27_648, "B/token"),
    "latent rows at 1,000,000 tokens": (27.648, "GB"),
    "latent rows at 2^20 tokens": (27.0, "GiB"),
    "break-even of a state": (2730.67, "tokens"),
    "break-even against the real cache": (7850.67, "tokens"),
    "dense attention at 1,000,000 tokens": (1.475, "TFLOP/token"),
    "the same, absorbed": (5.01, "TFLOP/token"),
    "latent rows read": (56.62, "MB/token"),
    "index keys": (3.0, "KiB/token"),
    "index keys at 1,000,000 tokens": (3.07, "GB"),
    "index keys with scales": (3.17, "GB"),
    "indexer at 1,000,000 tokens": (196.6, "GFLOP/token"),
    "dense attention against the indexer": (7.5, "×"),
    "block representations": (126.0, "KiB/token"),
    "residual mixes": (187, "mixes"),
    "layers in the last block": (9, "layers"),
    "routed experts": (1.4465, "TB"),
}


def test_the_published_figures_of_k3_1_pro() -> None:
    rows = {row.name: row for row in costs.describe(K3_1_PRO)}
    found = {name: (rows[name].value, rows[name].unit) for name in PUBLISHED}
    for name, (value, unit) in PUBLISHED.items():
        assert found[name] == (pytest.approx(value, rel=1e-3, abs=0), unit), name


def test_the_published_parameter_counts_of_k3() -> None:
    count = costs.parameters(K3)
    assert count.total / 1e12 == pytest.approx(2.7795, abs=5e-5)
    assert count.active / 1e9 == pytest.approx(104.19, abs=5e-3)
    assert (count.total - count.experts) * 2 / 1e9 == pytest.approx(113.49, abs=5e-3)


def test_kimi_linear_is_named_by_its_counts() -> None:
    count = costs.parameters(KIMI_LINEAR_48B)
    assert round(count.total / 1e9) == 49
    assert round(count.active / 1e9) == 3


def test_the_state_of_one_rank() -> None:
    assert costs.matrix_bytes(K3) == 6 << 20
    assert len(K3.kda_layers) * costs.matrix_bytes(K3, tp=8) == 51.75 * (1 << 20)
    assert costs.state_bytes(K3, tp=8) * 8 == costs.state_bytes(K3)
    with pytest.raises(AssertionError, match="heads divide"):
        costs.matrix_bytes(K3, tp=5)


def test_the_layers_of_the_table() -> None:
    """Global layers as the released configs list them, counted from 1; the last two layers of K3 are both global."""
    assert [layer + 1 for layer in KIMI_LINEAR_48B.global_layers] == [4, 8, 12, 16, 20, 24, 27]
    assert [layer + 1 for layer in K3_1_PRO.global_layers] == [*range(4, 93, 4), 93]
    assert all(len(set(s.global_layers) | set(s.kda_layers)) == s.layers for s in SHAPES.values())


def test_a_model_without_indexer_or_residuals_is_described_too() -> None:
    names = {row.name for row in costs.describe(KIMI_LINEAR_48B)}
    assert "index keys" not in names
    assert "block representations" not in names

"""Quantile balancing: the published toy case, balance reached, and the histogram's law of sharding."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.kernels import balance, moe

GOLDEN = Path(__file__).resolve().parents[1].parent / "shared" / "golden" / "moe" / "quantile_balancing.json"


def _loads(scores: torch.Tensor, bias: torch.Tensor, k: int) -> torch.Tensor:
    chosen = (scores + bias).topk(k, dim=1).indices
    return torch.bincount(chosen.flatten(), minlength=scores.shape[1])


@pytest.mark.skipif(not GOLDEN.is_file(), reason="needs shared/golden beside the repository")
def test_one_update_balances_the_published_case_with_its_bias() -> None:
    case = json.loads(GOLDEN.read_text())
    scores = torch.tensor(case["scores"], dtype=torch.float64)
    start = torch.tensor(case["start_bias"], dtype=torch.float64)
    assert _loads(scores, start, case["top_k"]).tolist() == case["start_loads"]
    bias = balance.quantile_bias(scores, start, case["top_k"])
    wanted = case["trace"]["qplus1"][0]
    assert bias.tolist() == pytest.approx(wanted["bias"])
    assert _loads(scores, bias, case["top_k"]).tolist() == wanted["loads_next"]


def _skewed(seed: int, tokens: int, experts: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.sigmoid(torch.randn(tokens, experts, generator=random) + torch.linspace(-2, 2, experts))


def test_updates_balance_a_skewed_router() -> None:
    scores, bias = _skewed(7, 4096, 16), torch.zeros(16)
    before = _loads(scores, bias, 4)
    assert before.max() > 3 * before.float().mean()
    for _ in range(8):
        bias = balance.quantile_bias(scores, bias, 4)
    loads = _loads(scores, bias, 4)
    assert loads.max() < 1.1 * loads.float().mean()
    assert float(bias.mean()) == pytest.approx(0.0, abs=1e-6)


def test_a_bias_never_enters_the_weights() -> None:
    x, gate = torch.randn(32, 8), torch.randn(16, 8)
    bias = balance.quantile_bias(torch.sigmoid(x @ gate.t()), torch.zeros(16), 4)
    chosen, weights = moe.route(x, gate, bias, 4, 1.0, False)
    assert torch.allclose(weights, torch.sigmoid(x @ gate.t()).gather(1, chosen), atol=1e-6)


@given(st.integers(0, 10_000), st.lists(st.integers(1, 200), min_size=1, max_size=6), st.integers(1, 7))
def test_counts_of_any_sharding_give_one_bias_within_a_bin_of_the_exact(seed: int, parts: list[int], k: int) -> None:
    scores, bias = _skewed(seed, sum(parts), 8), torch.linspace(-0.3, 0.3, 8)
    whole = balance.count(scores, bias, k)
    added = torch.stack([balance.count(part, bias, k) for part in torch.split(scores, parts)]).sum(0)
    assert torch.equal(whole, added)
    exact = -balance.margins(scores, bias, k).topk(len(scores) * k // 8 + 1, dim=0).values[-1]
    coarse = balance.histogram_bias(whole, k)
    assert (coarse - balance.quantile_bias(scores, bias, k)).abs().max() <= balance.BIN
    assert float(coarse.mean()) == pytest.approx(0.0, abs=1e-5)
    assert balance.LOW <= -exact.max() <= balance.HIGH

"""Exact mode: a row's bits depend neither on its batch, nor on its place, nor on how a prefill was cut."""

import pytest
import torch

from forebay.kernels import dsa, exact, kda, mla, moe, norms
from forebay.kernels.models import KIMI_LINEAR_48B
from forebay.kernels.probe import probe
from forebay.kernels.shapes import IndexShape, KdaShape, MlaShape, ModelShape, MoeShape

SMALL = ModelShape(
    name="small",
    layers=9,
    hidden=96,
    vocab=300,
    dense_width=128,
    dense_layers=1,
    global_layers=(3, 7, 8),
    kda=KdaShape(heads=4, head_dim=32, gate_rank=32, full_rank_out_gate=True),
    mla=MlaShape(heads=4, q_rank=48, kv_rank=48, nope_dim=32, pe_dim=16, value_dim=32, out_gate=True),
    index=IndexShape(heads=4, head_dim=32, top_k=64),
    moe=MoeShape(
        experts=16,
        per_token=4,
        width=64,
        shared_width=64,
        latent=64,
        latent_norm=True,
        scaling=1.0,
        expert_format="mxfp4",
    ),
    activation="situ",
    attn_res_block=3,
    context_tokens=4096,
    bos_id=0,
    eos_id=1,
    pad_id=2,
)


@pytest.mark.parametrize("threads", [1, 2])
def test_every_operator_is_exact_on_this_machine(threads: int) -> None:
    before = torch.get_num_threads()
    assert probe(SMALL, threads) == []
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("owner", "operator", "named"),
    [
        (norms, "rms_norm", ["rms_norm"]),
        (kda, "step", ["kda.step"]),
        (mla, "attend_prefill", ["mla.attend_prefill"]),
        (dsa, "index_scores_decode", ["dsa.index_scores_decode"]),
        (moe, "experts", ["moe.experts"]),
    ],
)
def test_the_probe_names_an_operator_whose_rows_know_their_batch(
    monkeypatch: pytest.MonkeyPatch, owner: object, operator: str, named: list[str]
) -> None:
    honest = getattr(owner, operator)

    def counting(*args: object) -> object:
        result = honest(*args)
        if isinstance(result, tuple):
            return result[0] + len(result[0]) * 1e-6, *result[1:]
        return result + len(result) * 1e-6

    monkeypatch.setattr(owner, operator, counting)
    assert probe(SMALL, 1) == named


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9])
@pytest.mark.parametrize("width", [16, KIMI_LINEAR_48B.hidden])
def test_a_linear_row_has_the_same_bits_in_any_batch(rows: int, width: int) -> None:
    random = torch.Generator().manual_seed(rows)
    x, w = torch.randn(200, width, generator=random), torch.randn(70, width, generator=random)
    whole = exact.linear(x, w)
    for first in (0, 5, 190):
        assert torch.equal(exact.linear(x[first : first + rows], w), whole[first : first + rows])


def test_a_transposed_input_has_the_bits_of_a_plain_one() -> None:
    random = torch.Generator().manual_seed(1)
    x, w = torch.randn(40, 64, generator=random), torch.randn(30, 64, generator=random)
    assert torch.equal(exact.linear(x.t().contiguous().t(), w), exact.linear(x, w))


@pytest.mark.parametrize("name", ["sigmoid", "silu", "softplus"])
def test_elementwise_functions_are_right_to_the_ends(name: str) -> None:
    x = torch.linspace(-200, 200, 4001)
    found = getattr(exact, name)(x)
    expected = getattr(torch.nn.functional, name)(x.double())
    assert bool(found.isfinite().all())
    # torch's softplus is the identity above 20; the two differ by less than fp32 resolves there.
    assert torch.allclose(found.double(), expected, rtol=3e-6, atol=1e-30 if name == "sigmoid" else 1e-7)

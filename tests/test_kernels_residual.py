"""Attention residuals in two phases against one softmax over all sources; the norms against their formulas."""

import pytest
import torch
from torch import Tensor

from forebay.kernels import attnres, norms, reference

EPS = 1e-5


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("blocks", [1, 2, 8], ids="N{}".format)
def test_two_phases_make_one_softmax(blocks: int) -> None:
    bank, p, ws = draw(1, blocks, 13, 32) * 3, draw(2, 13, 32), draw(3, 5, 32) * 0.5
    partials = attnres.inter(bank.float(), ws.float(), EPS)
    for i in range(5):
        found = attnres.merge(partials.query(i), p.float(), ws[i].float(), EPS)
        expected = reference.mix(torch.cat((bank, p[None])), ws[i], EPS)
        assert torch.allclose(found.double(), expected, atol=5e-6)


def test_without_finished_blocks_the_mix_is_the_prefix() -> None:
    p, ws = draw(1, 7, 32).float(), draw(2, 3, 32).float()
    partials = attnres.inter(torch.empty(0, 7, 32), ws, EPS)
    assert torch.equal(attnres.merge(partials.query(2), p, ws[2], EPS), p)


def test_scores_far_apart_choose_one_source() -> None:
    bank, p, w = draw(1, 2, 4, 16).float(), draw(2, 4, 16).float(), draw(3, 16).float() * 1e4
    found = attnres.merge(attnres.inter(bank, w[None], EPS).query(0), p, w, EPS)
    expected = reference.mix(torch.cat((bank, p[None])).double(), w.double(), EPS)
    assert torch.allclose(found.double(), expected, atol=1e-4)


def test_fold() -> None:
    norm, proj = draw(1, 32).float(), draw(2, 1, 32).float()
    assert torch.equal(attnres.fold(norm, proj), norm * proj[0])


def test_rms_norm() -> None:
    x, w = draw(1, 9, 64) * 10, draw(2, 64)
    expected = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * w
    assert torch.allclose(norms.rms_norm(x.float(), w.float(), EPS).double(), expected, rtol=1e-5, atol=1e-6)


def test_rms_norm_of_bf16_rounds_before_the_weight() -> None:
    x, w = draw(1, 9, 64).bfloat16(), draw(2, 64).bfloat16()
    wide = x.float()
    rounded = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).bfloat16()
    assert torch.equal(norms.rms_norm(x, w, EPS), rounded * w)


def test_l2_norm_has_its_eps_inside_the_root() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-4, 0.0]])
    expected = torch.tensor([[0.6, 0.8], [0.0, 0.0], [0.0995037, 0.0]])
    assert torch.allclose(norms.l2_norm(x), expected, atol=1e-6)


def test_the_gated_norm_gates_after_it_normalises() -> None:
    o, gate, w = draw(1, 5, 2, 16), draw(2, 5, 2, 16), draw(3, 16)
    expected = o / (o.square().mean(-1, keepdim=True) + EPS).sqrt() * w * torch.sigmoid(gate)
    found = norms.gated_rms_norm(o.float(), gate.float(), w.float(), EPS)
    assert torch.allclose(found.double(), expected, atol=1e-5)


def test_layer_norm() -> None:
    x, w, b = draw(1, 5, 16), draw(2, 16), draw(3, 16)
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w + b
    assert torch.allclose(norms.layer_norm(x.float(), w.float(), b.float(), 1e-6).double(), expected, atol=1e-5)

"""A decode step of a slice reads what changes from tensors, in place: the same call follows them."""

import torch

from forebay.kernels import bench_slice, slice_step
from forebay.kernels.bench_slice import SMALL


def test_the_same_step_follows_lengths_and_pages_changed_in_place() -> None:
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    of = bench_slice.group(SMALL, 2, 128, cpu, torch.float32)
    prefix, bank = torch.randn(2, SMALL.hidden), torch.randn(3, 2, SMALL.hidden)
    lengths = torch.tensor([40, 100], dtype=torch.int32)
    kept = [(part.states.clone(), part.tails.clone()) for part, _ in of.layers[:3]]

    def run() -> torch.Tensor:
        for (part, _), (states, tails) in zip(of.layers, kept, strict=False):
            part.states.copy_(states)
            part.tails.copy_(tails)
        return slice_step.step(of, prefix, bank, lengths)

    first = run()
    # The sequences change places, by their tensors alone: so do the results.
    tables = [of.layers[3][0].rows.table, *(part.page for part, _ in of.layers[:3]), lengths, prefix]
    for tensor in tables:
        tensor.copy_(tensor.flip(0))
    bank.copy_(bank.flip(1))
    second = run()
    assert torch.allclose(second, first.flip(0), atol=1e-5)
    lengths.copy_(torch.tensor([7, 100], dtype=torch.int32))
    third = run()
    assert not torch.allclose(third[0], second[0], atol=1e-3)


def test_a_step_leaves_its_row_at_its_length_and_nowhere_else() -> None:
    torch.manual_seed(1)
    of = bench_slice.group(SMALL, 1, 128, torch.device("cpu"), torch.float32)
    part = of.layers[3][0]
    before = part.rows.pool.clone()
    lengths = torch.tensor([71], dtype=torch.int32)
    slice_step.step(of, torch.randn(1, SMALL.hidden), torch.randn(2, 1, SMALL.hidden), lengths)
    changed = (part.rows.pool != before).any(2).nonzero().tolist()
    assert changed == [[int(part.rows.table[0, 1]), 6]]

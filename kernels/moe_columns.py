"""The order in which the expert kernels want a row's columns, so that MXFP4 weights unpack without a shuffle.

A thread of a tensor-core product holds, of 64 packed bytes of a weight row, the 16 in one piece that a load brings it:
one scale group. Products do not mind the order of their columns, so activations come in the order in which those bytes
then stand: in each block of 128 columns the even ones (low nibbles), then the odd ones, and in either half byte
16 t + 2 j + b at place 8 j + 2 t + b (t of 4 threads, j of 8, b of 2).
"""

import torch
from torch import Tensor

BLOCK = 128
GROUPS, PAIRS = 4, 8


def order(columns: int, device: torch.device | None = None) -> Tensor:
    """int64 [columns]: which column stands at each place; `columns` is a multiple of BLOCK."""
    assert columns % BLOCK == 0, "columns come in whole blocks"
    at = torch.arange(columns, device=device).view(-1, GROUPS, PAIRS, 2, 2)  # block, t, j, b, nibble
    return at.permute(0, 4, 2, 1, 3).reshape(-1)


def arrange(x: Tensor) -> Tensor:
    """x [T, columns] in the kernels' order."""
    return x[:, order(x.shape[1], x.device)]

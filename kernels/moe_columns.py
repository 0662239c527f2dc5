"""The order in which the expert kernels want a row's columns, so that MXFP4 weights unpack without a shuffle.

A thread of a tensor-core product holds, of 64 packed bytes of a weight row, the 16 in one piece that a load brings it:
one scale group. Products do not mind the order of their columns, so activations come in the order in which those bytes
then stand. Of a block's 32 words of 16 bits, each of four columns, the lowest nibbles come first, then the second, the
third, the highest; of each kind word 8 t + 2 j + b at place 8 j + 2 t + b (t of 4 threads, j of 4, b of 2). Where a
thread holds two such pairs side by side (`mxfp4_triton.side`), j = 2 i + s is at place 16 i + 4 t + 2 s + b.
"""

import torch
from torch import Tensor

BLOCK = 128
GROUPS, PAIRS = 4, 4


def order(columns: int, side: int = 1, device: torch.device | None = None) -> Tensor:
    """int64 [columns]: which column stands at each place; `columns` is a multiple of BLOCK, `side` 1 or 2."""
    assert columns % BLOCK == 0, "columns come in whole blocks"
    at = torch.arange(columns, device=device).view(-1, GROUPS, PAIRS // side, side, 2, 4)  # block, t, pair, b, nibble
    return at.permute(0, 5, 2, 1, 3, 4).reshape(-1)

"""MXFP4 groups: E2M1 codes two to a byte (low nibble = even column), one E8M0 scale byte s for 32 columns, multiplier
2^(s-127).
"""

import torch
from torch import Tensor

GROUP = 32
CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# Two fp32 values a byte, looked up as one int64: ten times faster than a look-up of rows of two.
_PAIRS = torch.tensor([(CODES[byte & 15], CODES[byte >> 4]) for byte in range(256)]).view(torch.int64).flatten()
# 2^-127 is a subnormal fp32 and exact; byte 255 is NaN by the OCP MX rule.
_SCALES = torch.tensor([2.0 ** (byte - 127) for byte in range(255)] + [float("nan")], dtype=torch.float64).float()


def unpack(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """packed uint8 [..., out, in/2] and scale uint8 [..., out, in/32]: weights [..., out, in] in `dtype` (exact in
    bf16 too).
    """
    pairs = _PAIRS.to(packed.device).index_select(0, packed.flatten().int()).view(torch.float32)
    multiplier = _SCALES.to(scale.device).index_select(0, scale.flatten().int())
    groups = pairs.view(-1, GROUP) * multiplier[:, None]
    return groups.view(*packed.shape[:-1], -1).to(dtype)


def quantize(w: Tensor) -> tuple[Tensor, Tensor]:
    """w [..., out, in] to (packed uint8 [..., out, in/2], scale uint8 [..., out, in/32]) by the rule of
    compressed-tensors.

    Scale: the exponent of the group's largest magnitude, rounded up from mantissa 1.75, minus 2. Codes: nearest, ties
    to even; -0.0 packs as +0. A zero group has scale byte 0.
    """
    groups = w.float().reshape(*w.shape[:-1], -1, GROUP)
    bits = groups.abs().amax(-1).view(torch.int32)
    exponent = (bits + (1 << 21)) >> 23
    scale = (exponent - 2).clamp(0, 254).to(torch.uint8)
    scaled = (groups.double() / _SCALES.double().to(w.device)[scale.int()][..., None]).flatten(-2)
    size = scaled.abs()
    code = sum((size > cut).int() for cut in (0.25, 1.25, 2.5, 5.0)) + sum(
        (size >= cut).int() for cut in (0.75, 1.75, 3.5)
    )
    code = code + 8 * (scaled < 0).int()
    return (code[..., ::2] | (code[..., 1::2] << 4)).to(torch.uint8), scale

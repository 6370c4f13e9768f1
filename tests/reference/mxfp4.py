"""MXFP4 as checkpoints pack it (OCP Microscaling Formats v1.0; compressed-tensors' mxfp4-pack-quantized), by the bits.

Byte j of a row holds column 2j in its low half and column 2j + 1 in its high half. A code is a sign (bit 3) and an
index (bits 0 to 2) into MAGNITUDES. A scale byte s, one for 32 columns, stands for 2^(s - 127).
"""

from __future__ import annotations

import torch
from torch import Tensor

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP = 32


def dequantize(packed: Tensor, scale: Tensor) -> Tensor:
    """[rows, columns / 2] uint8 and [rows, columns / 32] uint8 -> [rows, columns] float32."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
    values = torch.tensor(MAGNITUDES)[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
    factors = torch.exp2(scale.double() - 127).float()
    return values * factors.repeat_interleave(GROUP, -1)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, columns] -> packed [rows, columns / 2] and scale [rows, columns / 32], to the nearest magnitude.

    The scale of a group is floor(log2 of its largest magnitude) - 2, so that 6 covers it or nearly so.
    """
    groups = weight.float().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1).clamp_min(2.0**-120)
    scale = (torch.floor(torch.log2(largest)) - 2 + 127).clamp(0, 254)
    scaled = (groups / torch.exp2(scale - 127).unsqueeze(-1)).flatten(-2)
    distance = (scaled.abs().unsqueeze(-1) - torch.tensor(MAGNITUDES)).abs()
    codes = distance.argmin(-1) + 8 * (scaled < 0)
    pairs = codes.unflatten(-1, (-1, 2)).to(torch.uint8)
    return pairs[..., 0] | (pairs[..., 1] << 4), scale.to(torch.uint8)

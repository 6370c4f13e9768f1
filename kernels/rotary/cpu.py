"""Rotary embedding on CPUs: queries and keys side by side in one fresh tensor, rotated in place.

Legend: T tokens, N query heads, K key heads, D head dim, R rotated dims, h = R / 2.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(
    q_TND: Tensor, k_TKD: Tensor, cos_TR: Tensor, sin_TR: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate the first R dims of every head by the angle of its token (see the reference for the contract)."""
    num_heads, num_tokens, half = q_TND.shape[1], cos_TR.shape[0], cos_TR.shape[1]
    both_TMD = torch.cat((q_TND, k_TKD), 1)
    rotated_TMR = both_TMD if both_TMD.shape[2] == 2 * half else both_TMD[:, :, : 2 * half]
    if interleaved:  # [T, M, h, 2]: the partner is the neighbour
        pairs = rotated_TMR.view(num_tokens, -1, half, 2)
        partner = pairs.flip(3)
        cos, sin = cos_TR[:, None, :, None], torch.stack((-sin_TR, sin_TR), 2)[:, None]
    else:  # [T, M, 2, h]: the partner is half a head away
        pairs = rotated_TMR.view(num_tokens, -1, 2, half)
        partner = pairs.flip(2)
        cos, sin = cos_TR[:, None, None], torch.stack((-sin_TR, sin_TR), 1)[:, None]
    pairs.mul_(cos).addcmul_(partner, sin)
    return both_TMD[:, :num_heads], both_TMD[:, num_heads:]

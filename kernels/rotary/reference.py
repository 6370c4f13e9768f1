"""Reference of rotary position embedding: plain torch, the truth that every other implementation is compared with.

Legend: T tokens, N query heads, K key heads, D head dim, R rotated dims (R <= D, even).
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(
    q_TND: Tensor, k_TKD: Tensor, cos_TR: Tensor, sin_TR: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate the first R dims of every head by the angle of its token; the other dims pass unchanged.

    `q_TND` [T, N, D] and `k_TKD` [T, K, D] may be strided views; `cos_TR` and `sin_TR` are [T, R/2]. The pairs are (i,
    i + R/2) (halved, as in Llama) or (2i, 2i + 1) (interleaved, as in GPT-J and DeepSeek); the result keeps the order
    of the input. Computed in float32, rounded once. Su et al., arXiv:2104.09864. Not covered: the angles themselves.
    """
    return _rotate(q_TND, cos_TR, sin_TR, interleaved), _rotate(k_TKD, cos_TR, sin_TR, interleaved)


def _rotate(x_TND: Tensor, cos_TR: Tensor, sin_TR: Tensor, interleaved: bool) -> Tensor:
    half = cos_TR.shape[-1]
    rotated, passed = x_TND[..., : 2 * half].float(), x_TND[..., 2 * half :]
    cos, sin = cos_TR.float().unsqueeze(1), sin_TR.float().unsqueeze(1)
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated[..., :half], rotated[..., half:]
    first, second = first * cos - second * sin, second * cos + first * sin
    if interleaved:
        rotated = torch.stack((first, second), dim=-1).flatten(-2)
    else:
        rotated = torch.cat((first, second), dim=-1)
    return torch.cat((rotated.to(x_TND.dtype), passed), dim=-1)

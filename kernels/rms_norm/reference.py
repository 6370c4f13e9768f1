"""Reference of RMS normalisation: plain torch, the truth that every other implementation is compared with.

Legend: T tokens (any number of leading dims), H normalised width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Scale each row to unit root mean square, then by the weight.

    `x_TH` [..., H] in any floating dtype and `weight_H` [H] give [..., H] in the dtype of `x_TH`. The mean is taken
    in float32. With `offset` 0 the normalised row is rounded to the dtype of `x_TH` before it meets the weight
    (LlamaRMSNorm of transformers, bit for bit); with another offset the weight is `weight + offset` and everything up
    to the last rounding is float32 (GemmaRMSNorm, offset 1). Zhang and Sennrich, arXiv:1910.07467. Not covered:
    grouped norms.
    """
    x_float_TH = x_TH.float()
    variance_T1 = x_float_TH.pow(2).mean(-1, keepdim=True)
    normed_TH = x_float_TH * torch.rsqrt(variance_T1 + eps)
    if offset:
        return (normed_TH * (weight_H.float() + offset)).to(x_TH.dtype)
    return (weight_H * normed_TH.to(x_TH.dtype)).to(x_TH.dtype)


def add_rms_norm(
    x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Add a block's output to the residual stream and normalise the sum: (normed, summed).

    Both inputs and both outputs are [..., H] in one dtype; the sum is rounded to that dtype before it is normalised, as
    it is when the two steps are separate.
    """
    summed_TH = x_TH + residual_TH
    return rms_norm(summed_TH, weight_H, eps, offset), summed_TH

"""RMS normalisation on CPUs: the reference's arithmetic in fewer calls, each a pass that torch vectorises.

torch's own rms_norm is no fused kernel on CPUs: it is made of the same small operators as the reference.

Legend: T tokens (any number of leading dims), H normalised width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Scale each row to unit root mean square, then by the weight (see the reference for the contract)."""
    norm_T1 = torch.linalg.vector_norm(x_TH, 2, -1, True, dtype=torch.float32)
    inverse_T1 = torch.rsub(norm_T1.square_(), eps, alpha=-1.0 / x_TH.shape[-1]).rsqrt_()  # eps + norm^2 / H
    if offset:
        return (x_TH * inverse_T1).mul_(weight_H.float() + offset).to(x_TH.dtype)
    normed_TH = torch.empty_like(x_TH)
    torch.mul(x_TH, inverse_T1, out=normed_TH)
    return normed_TH.mul_(weight_H)


def add_rms_norm(
    x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Add, then normalise the sum: (normed, summed)."""
    summed_TH = x_TH + residual_TH
    return rms_norm(summed_TH, weight_H, eps, offset), summed_TH

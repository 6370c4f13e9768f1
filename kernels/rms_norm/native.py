"""RMS normalisation by our own C++ for bfloat16 on CPUs: one call instead of nine, the reference's roundings.

Legend: T tokens (any number of leading dims), H normalised width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.kernels.native.build import function


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """See the reference for the contract; `x_TH` and `weight_H` are bfloat16."""
    assert x_TH.dtype == weight_H.dtype == torch.bfloat16, (x_TH.dtype, weight_H.dtype)
    H = x_TH.shape[-1]
    if x_TH.is_contiguous():
        outer, inner, outer_stride, inner_stride = x_TH.numel() // H, 1, H, 0
    elif x_TH.dim() == 3 and x_TH.stride(-1) == 1:  # heads cut out of a wider product
        (outer, inner, _), (outer_stride, inner_stride, _) = x_TH.shape, x_TH.stride()
    else:
        return rms_norm(x_TH.contiguous(), weight_H, eps, offset)
    y_TH = torch.empty_like(x_TH, memory_format=torch.contiguous_format)
    function("rms_norm", "ppplllllffi")(
        x_TH.data_ptr(), weight_H.data_ptr(), y_TH.data_ptr(),
        outer, inner, outer_stride, inner_stride, H, eps, offset, torch.get_num_threads(),
    )  # fmt: skip
    return y_TH


def add_rms_norm(
    x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """See the reference for the contract; all tensors are bfloat16."""
    assert x_TH.dtype == residual_TH.dtype == weight_H.dtype == torch.bfloat16, (x_TH.dtype, weight_H.dtype)
    assert x_TH.shape == residual_TH.shape, (x_TH.shape, residual_TH.shape)
    x_TH, residual_TH = x_TH.contiguous(), residual_TH.contiguous()
    H = x_TH.shape[-1]
    normed_TH, summed_TH = torch.empty_like(x_TH), torch.empty_like(x_TH)
    function("add_rms_norm", "pppppllffi")(
        x_TH.data_ptr(), residual_TH.data_ptr(), weight_H.data_ptr(), normed_TH.data_ptr(), summed_TH.data_ptr(),
        x_TH.numel() // H, H, eps, offset, torch.get_num_threads(),
    )  # fmt: skip
    return normed_TH, summed_TH

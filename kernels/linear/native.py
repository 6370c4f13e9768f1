"""Linear layers by our own C++ for bfloat16 on CPUs: no copy of the weight, and a row gives the same bits in any batch.

Legend: T rows, H input width, F output width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.kernels.native.build import function, has_bf16_dot
from firstlight.kernels.signatures import PreparedLinear

MANY_ROWS = 32  # from here on arithmetic decides, not memory


def prepare(weight_FH: Tensor, bias_F: Tensor | None = None, row_counts: Sequence[int] = (1,)) -> PreparedLinear:
    """Keep the weight [F, H] and bias [F], bfloat16 and contiguous: x [T, H] gives x @ weight.T + bias, [T, F]."""
    return NativeLinear(weight_FH, bias_F)


class NativeLinear:
    """A weight and where it lies in memory; call it with x [T, H] or [..., H] in bfloat16."""

    __slots__ = ("_H", "_bias_F", "_bias_address", "_function", "_many_rows", "_out", "_weight_FH", "_weight_address")

    def __init__(self, weight_FH: Tensor, bias_F: Tensor | None) -> None:
        for tensor in (weight_FH, bias_F):
            if tensor is not None and (tensor.dtype != torch.bfloat16 or not tensor.is_contiguous()):
                raise ValueError(
                    f"native linear: bfloat16 and contiguous expected, {tensor.dtype} {tensor.stride()} found"
                )
        self._weight_FH, self._bias_F = weight_FH, bias_F
        self._weight_address = weight_FH.data_ptr()
        self._bias_address = None if bias_F is None else bias_F.data_ptr()
        self._out, self._H = weight_FH.shape
        self._many_rows = None if multiplies_as_fast_as_torch() else MANY_ROWS
        self._function = function("linear", "ppppllli")

    def __call__(self, x_TH: Tensor) -> Tensor:
        if x_TH.dim() != 2 or not x_TH.is_contiguous():
            return self(x_TH.reshape(-1, self._H).contiguous()).view(*x_TH.shape[:-1], self._out)
        T, H = x_TH.shape
        assert x_TH.dtype is torch.bfloat16, x_TH.dtype
        assert self._H == H, (self._H, H)
        if self._many_rows is not None and self._many_rows <= T:
            return F.linear(x_TH, self._weight_FH, self._bias_F)
        y_TF = torch.empty(T, self._out, dtype=torch.bfloat16)  # two ints parse faster than a tuple
        self._function(
            self._weight_address, self._bias_address, x_TH.data_ptr(), y_TF.data_ptr(),
            T, self._out, H, torch.get_num_threads(),
        )  # fmt: skip
        return y_TF


@cache
def multiplies_as_fast_as_torch() -> bool:
    """Whether many rows are served here: not without bfloat16 dot products, nor where oneDNN has AMX tiles."""
    return has_bf16_dot() and not torch.cpu._is_amx_tile_supported()

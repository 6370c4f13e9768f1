"""Rotary positions by our own C++ for bfloat16 on CPUs: queries and keys in one call.

Legend: T tokens, N query heads, K key heads, D head dim, R rotated dims.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.kernels.native.build import function


def rotary(
    q_TND: Tensor, k_TKD: Tensor, cos_TR: Tensor, sin_TR: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """See the reference for the contract; `q_TND` and `k_TKD` are bfloat16."""
    assert q_TND.dtype == k_TKD.dtype == torch.bfloat16, (q_TND.dtype, k_TKD.dtype)
    q_TND, k_TKD = _rows(q_TND), _rows(k_TKD)
    cos_TR, sin_TR = cos_TR.float().contiguous(), sin_TR.float().contiguous()
    (T, N, D), K = q_TND.shape, k_TKD.shape[1]
    q_out = torch.empty((T, N, D), dtype=torch.bfloat16)
    k_out = torch.empty((T, K, D), dtype=torch.bfloat16)
    function("rotary", "plllpplllppplllii")(
        q_TND.data_ptr(), q_TND.stride(0), q_TND.stride(1), N, q_out.data_ptr(),
        k_TKD.data_ptr(), k_TKD.stride(0), k_TKD.stride(1), K, k_out.data_ptr(),
        cos_TR.data_ptr(), sin_TR.data_ptr(), T, D, cos_TR.shape[-1], interleaved, torch.get_num_threads(),
    )  # fmt: skip
    return q_out, k_out


def _rows(x_TND: Tensor) -> Tensor:
    return x_TND if x_TND.stride(-1) == 1 else x_TND.contiguous()

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
    cos_TR, sin_TR = _angles(cos_TR), _angles(sin_TR)
    (T, N, D), K = q_TND.shape, k_TKD.shape[1]
    q_token, q_head, _ = q_TND.stride()
    k_token, k_head, _ = k_TKD.stride()
    q_out = torch.empty(T, N, D, dtype=torch.bfloat16)
    k_out = torch.empty(T, K, D, dtype=torch.bfloat16)
    function("rotary", "plllpplllppplllii")(
        q_TND.data_ptr(), q_token, q_head, N, q_out.data_ptr(), k_TKD.data_ptr(), k_token, k_head, K, k_out.data_ptr(),
        cos_TR.data_ptr(), sin_TR.data_ptr(), T, D, cos_TR.shape[-1], interleaved, torch.get_num_threads(),
    )  # fmt: skip
    return q_out, k_out


def _rows(x_TND: Tensor) -> Tensor:
    return x_TND if x_TND.stride(-1) == 1 else x_TND.contiguous()


def _angles(x_TR: Tensor) -> Tensor:
    return x_TR if x_TR.dtype is torch.float32 and x_TR.is_contiguous() else x_TR.float().contiguous()

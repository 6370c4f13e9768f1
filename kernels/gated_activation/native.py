"""The gated activation by our own C++ for bfloat16 on CPUs: one pass. Legend: T tokens (any leading dims), F width."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from firstlight.kernels.native.build import function

KINDS: Mapping[str, int] = MappingProxyType(
    {"silu": 0, "gelu": 1, "gelu_tanh": 2, "quick_gelu": 3, "relu": 4, "relu2": 5, "sigmoid": 6}
)
"""The numbers of `Kind` in native.cpp."""


def gated_activation(gate_up_T2F: Tensor, activation: str = "silu") -> Tensor:
    """See the reference for the contract; `gate_up_T2F` is bfloat16."""
    assert gate_up_T2F.dtype == torch.bfloat16, gate_up_T2F.dtype
    x_T2F = gate_up_T2F.contiguous()
    F = x_T2F.shape[-1] // 2
    y_TF = torch.empty((*x_T2F.shape[:-1], F), dtype=torch.bfloat16)
    function("gated_activation", "ppllii")(
        x_T2F.data_ptr(), y_TF.data_ptr(), x_T2F.numel() // max(1, 2 * F), F, KINDS[activation], torch.get_num_threads()
    )
    return y_TF

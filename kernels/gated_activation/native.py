"""The gated activation by our own C++ for bfloat16 on CPUs: one pass. Legend: T tokens (any leading dims), F width."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from firstlight.kernels.gated_activation import reference
from firstlight.kernels.gated_activation.names import split
from firstlight.kernels.native.build import function

_NAMES = "silu gelu gelu_tanh quick_gelu relu relu2 sigmoid clamped capped situ"
KINDS: Mapping[str, int] = MappingProxyType({name: number for number, name in enumerate(_NAMES.split())})
"""The numbers of `Kind` in native.cpp."""


def gated_activation(gate_up_T2F: Tensor, activation: str = "silu") -> Tensor:
    """See the reference for the contract; `gate_up_T2F` is bfloat16."""
    assert gate_up_T2F.dtype == torch.bfloat16, gate_up_T2F.dtype
    if reference.ACTIVATIONS.is_added(activation):
        return reference.gated_activation(gate_up_T2F, activation)
    x_T2F = gate_up_T2F.contiguous()
    F = x_T2F.shape[-1] // 2
    y_TF = torch.empty((*x_T2F.shape[:-1], F), dtype=torch.bfloat16)
    kind, numbers = split(activation)
    first, second, third = (*numbers, 0.0, 0.0, 0.0)[:3]
    rows = x_T2F.numel() // max(1, 2 * F)
    function("gated_activation", "ppllfffii")(
        x_T2F.data_ptr(), y_TF.data_ptr(), rows, F, first, second, third, KINDS[kind], torch.get_num_threads()
    )
    return y_TF

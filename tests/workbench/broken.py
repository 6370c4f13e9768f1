"""An operator with a fault, for the tests that look for one."""

from __future__ import annotations

from torch import Tensor

from firstlight.kernels.gated_activation import reference


def gated_activation(gate_up_T2F: Tensor, activation: str) -> Tensor:
    """Right but for one channel."""
    out_TF = reference.gated_activation(gate_up_T2F, activation)
    out_TF[:, 0] *= 1.5
    return out_TF

"""The gated activation on CPUs: two passes in the dtype of the input, as the models' own code does it.

Legend: T tokens (any number of leading dims), F intermediate width.
"""

from __future__ import annotations

from torch import Tensor

from firstlight.kernels.gated_activation import reference
from firstlight.kernels.gated_activation.names import split


def gated_activation(gate_up_T2F: Tensor, activation: str = "silu") -> Tensor:
    """activation(gate) * up, the activation rounded before the product (see the reference for the contract).

    What bends both halves is float32 in the models' own code too.
    """
    if split(activation)[0] in reference.PAIRED:
        return reference.gated_activation(gate_up_T2F, activation)
    gate_TF, up_TF = gate_up_T2F.chunk(2, -1)
    return reference.ACTIVATIONS[activation](gate_TF).mul_(up_TF)

"""Reference of the gated activation: plain torch, the truth that every other implementation is compared with.

Legend: T tokens (any number of leading dims), F intermediate width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": partial(F.gelu, approximate="tanh"),
        "quick_gelu": _quick_gelu,
        "relu": F.relu,
        "relu2": _relu2,
        "sigmoid": torch.sigmoid,
    }
)


def gated_activation(gate_up_T2F: Tensor, activation: str = "silu") -> Tensor:
    """Apply the activation to the gate half and multiply by the other half.

    `gate_up_T2F` [..., 2F] holds [gate | up] along the last dim; the result is [..., F] in the same dtype, computed in
    float32 and rounded once. `activation` is a key of `ACTIVATIONS` or one of `PAIRED` with its numbers; another name is
    a KeyError. Shazeer, arXiv:2002.05202. Not covered: clamped variants.
    """
    gate_TF, up_TF = gate_up_T2F.float().chunk(2, dim=-1)
    kind, numbers = split(activation)
    if kind in PAIRED:
        return PAIRED[kind](gate_TF, up_TF, *numbers).to(gate_up_T2F.dtype)
    return (ACTIVATIONS[kind](gate_TF) * up_TF).to(gate_up_T2F.dtype)

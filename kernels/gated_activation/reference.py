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

from firstlight.kernels.gated_activation.known import Activations
from firstlight.kernels.gated_activation.names import split


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS = Activations(
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


def _clamped(gate: Tensor, up: Tensor, limit: float, alpha: float, shift: float) -> Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + shift)


def _capped(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def _situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * (linear_beta * torch.tanh(up / linear_beta))


PAIRED: Mapping[str, Callable[..., Tensor]] = MappingProxyType({"clamped": _clamped, "capped": _capped, "situ": _situ})
"""Joins of the two halves that are more than activation(gate) * up; float32, with the numbers in the name.

`clamped(limit,alpha,shift)`: gate and up cut off at the limit, then gate sigmoid(alpha gate) (up + shift); GPT-OSS,
MiniMax-M3, DeepSeek-V4. `capped(limit)`: silu(gate) cut off instead; Step 3.7. `situ(beta,linear_beta)`: both halves
bent by a tanh, so that no factor grows without bound; Kimi K3 (arXiv 2607.24653).
"""


def gated_activation(gate_up_T2F: Tensor, activation: str = "silu") -> Tensor:
    """Apply the activation to the gate half and multiply by the other half.

    `gate_up_T2F` [..., 2F] holds [gate | up] along the last dim; the result is [..., F] in the same dtype, computed in
    float32 and rounded once. `activation` is a key of `ACTIVATIONS`, or one of `PAIRED` with its numbers
    (`situ(4,25)`); another name is a KeyError. Shazeer, arXiv:2002.05202.
    """
    gate_TF, up_TF = gate_up_T2F.float().chunk(2, dim=-1)
    kind, numbers = split(activation)
    if kind in PAIRED:
        return PAIRED[kind](gate_TF, up_TF, *numbers).to(gate_up_T2F.dtype)
    return (ACTIVATIONS[activation](gate_TF) * up_TF).to(gate_up_T2F.dtype)

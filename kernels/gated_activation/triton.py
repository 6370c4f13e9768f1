"""The gated activation in Triton: one pass over blocks of a row.

Legend: T tokens (any number of leading dims), F intermediate width.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from firstlight.kernels.gated_activation import reference
from firstlight.kernels.gated_activation.names import split


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Apply an activation by name to a float32 block."""
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # 0.5 (1 + tanh z) = sigmoid(2 z)
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "quick_gelu":
        return x * tl.sigmoid(1.702 * x)
    elif ACTIVATION == "relu":
        return tl.maximum(x, 0.0)
    elif ACTIVATION == "relu2":
        positive = tl.maximum(x, 0.0)
        return positive * positive
    else:
        tl.static_assert(ACTIVATION == "sigmoid", "an activation that the kernel does not know")
        return tl.sigmoid(x)


@triton.jit
def bounded(x, b):
    """b tanh(x / b) of a float32 block: tanh u = 2 sigmoid(2 u) - 1."""
    return b * (2.0 * tl.sigmoid(2.0 * x / b) - 1.0)


@triton.jit
def combine(gate, up, a, b, c, ACTIVATION: tl.constexpr):
    """The two halves, float32 blocks, by the activation's name and its numbers."""
    if ACTIVATION == "clamped":
        gate = tl.minimum(gate, a)
        return gate * tl.sigmoid(b * gate) * (tl.minimum(tl.maximum(up, -a), a) + c)
    elif ACTIVATION == "capped":
        return tl.minimum(gate * tl.sigmoid(gate), a) * tl.minimum(tl.maximum(up, -a), a)
    elif ACTIVATION == "situ":
        return bounded(gate, a) * tl.sigmoid(gate) * bounded(up, b)
    else:
        return activate(gate, ACTIVATION) * up


@triton.jit
def _gated_activation_kernel(
    gate_up_ptr,
    out_ptr,
    width,
    row_stride,
    a,
    b,
    c,
    ACTIVATION: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside = column < width
    gate = tl.load(gate_up_ptr + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * row_stride + width + column, mask=inside, other=0.0).to(tl.float32)
    out = combine(gate, up, a, b, c, ACTIVATION)
    tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), mask=inside)


def gated_activation(gate_up_T2F: Tensor, activation: str = "silu") -> Tensor:
    """activation(gate) * up (see the reference for the contract)."""
    if reference.ACTIVATIONS.is_added(activation):
        return reference.gated_activation(gate_up_T2F, activation)
    width = gate_up_T2F.shape[-1] // 2
    out = torch.empty(*gate_up_T2F.shape[:-1], width, dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
    if out.numel() == 0:
        return out
    rows = gate_up_T2F.reshape(-1, 2 * width)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    block = min(1024, triton.next_power_of_2(width))
    kind, numbers = split(activation)
    first, second, third = (*numbers, 0.0, 0.0, 0.0)[:3]
    _gated_activation_kernel[(rows.shape[0], triton.cdiv(width, block))](
        rows, out, width, rows.stride(0), first, second, third, ACTIVATION=kind, BLOCK_F=block
    )
    return out

"""What the Triton kernels of several operators share."""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def dot(a, b, acc, UPCAST: tl.constexpr):
    """acc + a @ b with float32 sums; float32 operands are not rounded to tf32."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


def needs_upcast(x: Tensor) -> bool:
    """Say whether `dot` has to widen its operands: the interpreter multiplies the bits of bfloat16 as integers."""
    return x.device.type == "cpu" and x.dtype == torch.bfloat16


def unit_last_stride(x: Tensor) -> Tensor:
    """Copy what cannot be read along its last dim."""
    return x if x.stride(-1) == 1 else x.contiguous()

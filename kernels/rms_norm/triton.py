"""RMS normalisation in Triton: one program per row, or several rows where they are short.

Legend: M rows, H normalised width.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    summed_ptr,
    num_rows,
    inner,  # rows are [outer, inner, H]: two strides reach every view that a projection is cut into
    stride_outer,
    stride_inner,
    residual_stride_outer,
    residual_stride_inner,
    eps,
    offset,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ADD: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
):
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = tl.arange(0, BLOCK_H)
    inside = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    outer_row, inner_row = row // inner, row % inner
    start = outer_row * stride_outer + inner_row * stride_inner
    x = tl.load(x_ptr + start[:, None] + column[None, :], mask=inside, other=0.0)
    if ADD:
        start = outer_row * residual_stride_outer + inner_row * residual_stride_inner
        residual = tl.load(residual_ptr + start[:, None] + column[None, :], mask=inside, other=0.0)
        summed = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(summed_ptr + row[:, None] * WIDTH + column[None, :], summed, mask=inside)
        x = summed
    x_float = x.to(tl.float32)
    variance = tl.sum(x_float * x_float, axis=1) / WIDTH
    normed = x_float * (1.0 / tl.sqrt(variance + eps))[:, None]
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if ROUND_FIRST:
        normed = normed.to(x.dtype).to(tl.float32)
    out = normed * (weight + offset)[None, :]
    tl.store(out_ptr + row[:, None] * WIDTH + column[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Scale each row to unit root mean square, then by the weight (see the reference for the contract)."""
    return _launch(x_TH, None, weight_H, eps, offset)[0]


def add_rms_norm(
    x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Add and normalise in one pass: (normed, summed)."""
    return _launch(x_TH, residual_TH, weight_H, eps, offset)


def _launch(
    x_TH: Tensor, residual_TH: Tensor | None, weight_H: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    width = x_TH.shape[-1]
    out = torch.empty(x_TH.shape, dtype=x_TH.dtype, device=x_TH.device)
    summed = torch.empty_like(out) if residual_TH is not None else out
    num_rows = x_TH.numel() // width
    if num_rows == 0:
        return out, summed
    x_rows = _two_lead_dims(x_TH)
    residual_rows = x_rows if residual_TH is None else _two_lead_dims(residual_TH.expand_as(x_TH))
    block_width = triton.next_power_of_2(width)
    block_rows = max(1, min(16, 2048 // block_width, triton.next_power_of_2(num_rows)))
    _rms_norm_kernel[(triton.cdiv(num_rows, block_rows),)](
        x_rows,
        residual_rows,
        weight_H,
        out,
        summed,
        num_rows,
        x_rows.shape[1],
        x_rows.stride(0),
        x_rows.stride(1),
        residual_rows.stride(0),
        residual_rows.stride(1),
        eps,
        offset,
        WIDTH=width,
        BLOCK_M=block_rows,
        BLOCK_H=block_width,
        ADD=residual_TH is not None,
        ROUND_FIRST=offset == 0.0,
        num_warps=min(16, max(1, block_rows * block_width // 512)),
    )
    return out, summed


def _two_lead_dims(x: Tensor) -> Tensor:
    """View as [outer, inner, H] with a last stride of 1, copying only what no pair of strides can describe."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    if x.dim() == 3:
        return x
    return x.reshape(-1, 1, x.shape[-1])

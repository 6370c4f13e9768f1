"""Rotary embedding in Triton: queries and keys in one launch, a program per token and block of heads.

Legend: T tokens, N query heads, K key heads, M = N + K, D head dim, R rotated dims.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from firstlight.kernels.triton_support import unit_last_stride


@triton.jit
def _rotary_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    num_heads,
    num_kv_heads,
    q_stride_token,
    q_stride_head,
    k_stride_token,
    k_stride_head,
    angle_stride,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dim = tl.arange(0, BLOCK_D)
    rotated = dim < 2 * HALF
    if INTERLEAVED:
        angle, partner, first = dim // 2, dim ^ 1, dim % 2 == 0
    else:
        angle, first = dim % HALF, dim < HALF
        partner = tl.where(first, dim + HALF, dim - HALF)
    cos = tl.load(cos_ptr + token * angle_stride + angle, mask=rotated, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * angle_stride + angle, mask=rotated, other=0.0).to(tl.float32)
    sin = tl.where(first, -sin, sin)
    in_dim = dim < HEAD_DIM
    is_query = (head < num_heads)[:, None] & in_dim[None, :]
    is_key = (head >= num_heads)[:, None] & (head < num_heads + num_kv_heads)[:, None] & in_dim[None, :]
    q_row = q_ptr + token * q_stride_token + head * q_stride_head
    k_row = k_ptr + token * k_stride_token + (head - num_heads) * k_stride_head
    x = tl.load(q_row[:, None] + dim[None, :], mask=is_query, other=0.0).to(tl.float32)
    x += tl.load(k_row[:, None] + dim[None, :], mask=is_key, other=0.0).to(tl.float32)
    turned = rotated[None, :]
    y = tl.load(q_row[:, None] + partner[None, :], mask=is_query & turned, other=0.0).to(tl.float32)
    y += tl.load(k_row[:, None] + partner[None, :], mask=is_key & turned, other=0.0).to(tl.float32)
    out = (x * cos[None, :] + y * sin[None, :]).to(q_out_ptr.dtype.element_ty)
    q_out = q_out_ptr + (token * num_heads + head) * HEAD_DIM
    k_out = k_out_ptr + (token * num_kv_heads + head - num_heads) * HEAD_DIM
    tl.store(q_out[:, None] + dim[None, :], out, mask=is_query)
    tl.store(k_out[:, None] + dim[None, :], out, mask=is_key)


def rotary(
    q_TND: Tensor, k_TKD: Tensor, cos_TR: Tensor, sin_TR: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate the first R dims of every head by the angle of its token (see the reference for the contract)."""
    q_out = torch.empty(q_TND.shape, dtype=q_TND.dtype, device=q_TND.device)
    k_out = torch.empty(k_TKD.shape, dtype=k_TKD.dtype, device=k_TKD.device)
    num_tokens, num_heads, head_dim = q_TND.shape
    num_kv_heads = k_TKD.shape[1]
    if num_tokens == 0:
        return q_out, k_out
    q_TND, k_TKD = unit_last_stride(q_TND), unit_last_stride(k_TKD)
    cos_TR, sin_TR = cos_TR.contiguous(), sin_TR.contiguous()
    block_dim = triton.next_power_of_2(head_dim)
    block_heads = max(1, min(triton.next_power_of_2(num_heads + num_kv_heads), 4096 // block_dim))
    _rotary_kernel[(num_tokens, triton.cdiv(num_heads + num_kv_heads, block_heads))](
        q_TND,
        k_TKD,
        cos_TR,
        sin_TR,
        q_out,
        k_out,
        num_heads,
        num_kv_heads,
        q_TND.stride(0),
        q_TND.stride(1),
        k_TKD.stride(0),
        k_TKD.stride(1),
        cos_TR.stride(0),
        HEAD_DIM=head_dim,
        HALF=cos_TR.shape[1],
        BLOCK_HEADS=block_heads,
        BLOCK_D=block_dim,
        INTERLEAVED=interleaved,
    )
    return q_out, k_out

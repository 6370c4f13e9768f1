"""The expert layer over MXFP4 weights in Triton: codes are unpacked in registers, on their way into the product.

Legend: M rows (T * k of them), T tokens, E experts held here, k chosen experts, H hidden, F output or intermediate
width.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from firstlight.kernels.moe.triton import expert_layer, expert_of_tile, tiles_for
from firstlight.kernels.triton_support import dot, needs_upcast, unit_last_stride


@triton.jit
def e2m1(code):
    """The float32 of a code of four bits: sign, two bits of exponent, one of mantissa."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    half = tl.where(mantissa == 1, 0x3F000000, 0)  # below one: 0 or 0.5
    bits = tl.where(exponent == 0, half, ((exponent + 126) << 23) | (mantissa << 22))
    return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def e8m0(byte):
    """2^(byte - 127); 255 is NaN."""
    bits = tl.where(byte == 0, 1 << 22, byte << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _grouped_matmul_kernel(
    x_ptr,
    codes_ptr,  # [E, F, H / 2]
    scales_ptr,  # [E, F, H / 32]
    out_ptr,
    group_start_ptr,
    row_ptr,  # which row of x stands at a sorted place; not read unless GATHER
    bias_ptr,  # [E, F]; not read unless HAS_BIAS
    num_experts,
    x_stride,
    H: tl.constexpr,
    F: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GATHER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    expert, tile_of_expert = expert_of_tile(group_start_ptr, num_experts, tl.program_id(0), BLOCK_E, BLOCK_M)
    if expert < num_experts:
        place = tl.load(group_start_ptr + expert) + tile_of_expert * BLOCK_M + tl.arange(0, BLOCK_M)
        is_row = place < tl.load(group_start_ptr + expert + 1)
        row = place
        if GATHER:
            row = tl.load(row_ptr + place, mask=is_row, other=0)
        column = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
        depth = tl.arange(0, BLOCK_H)
        x_row = x_ptr + row.to(tl.int64) * x_stride
        weight_row = tl.cast(expert, tl.int64) * F + column
        acc = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
        for first in range(0, H, BLOCK_H):
            inner = first + depth
            x = tl.load(x_row[:, None] + inner[None, :], mask=is_row[:, None] & (inner < H)[None, :], other=0.0)
            in_weight = (inner < H)[:, None] & (column < F)[None, :]
            byte = tl.load(
                codes_ptr + weight_row[None, :] * (H // 2) + (inner // 2)[:, None], mask=in_weight, other=0
            ).to(tl.int32)
            scale = tl.load(
                scales_ptr + weight_row[None, :] * (H // 32) + (inner // 32)[:, None], mask=in_weight, other=127
            ).to(tl.int32)
            code = (byte >> ((inner % 2) * 4)[:, None]) & 15
            weight = (e2m1(code) * e8m0(scale)).to(x.dtype)
            acc = dot(x, weight, acc, UPCAST)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + tl.cast(expert, tl.int64) * F + column, mask=column < F, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        out_row = out_ptr + place.to(tl.int64) * F
        is_out = is_row[:, None] & (column < F)[None, :]
        tl.store(out_row[:, None] + column[None, :], acc.to(out_ptr.dtype.element_ty), mask=is_out)


def moe_mxfp4(
    x_TH: Tensor,
    ids_Tk: Tensor,
    weights_Tk: Tensor,
    gate_up_codes: Tensor,
    gate_up_scales: Tensor,
    down_codes: Tensor,
    down_scales: Tensor,
    activation: str = "silu",
    expert_start: int = 0,
    gate_up_bias_E2F: Tensor | None = None,
    down_bias_EH: Tensor | None = None,
    gated: bool = True,
    weigh_input: bool = False,
) -> Tensor:
    """Sum each token's chosen experts, weighted (see the reference for the contract); rounded as `moe` in Triton is."""

    def enter(x_MH: Tensor, group_start_E1: Tensor, out_MF: Tensor, row_M: Tensor | None) -> None:
        _grouped_matmul(x_MH, gate_up_codes, gate_up_scales, group_start_E1, out_MF, row_M, gate_up_bias_E2F)

    def leave(x_MF: Tensor, group_start_E1: Tensor, out_MH: Tensor, row_M: Tensor | None) -> None:
        _grouped_matmul(x_MF, down_codes, down_scales, group_start_E1, out_MH, row_M, down_bias_EH)

    num_local, width = gate_up_codes.shape[:2]
    return expert_layer(
        x_TH, ids_Tk, weights_Tk, num_local, width, enter, leave, activation, expert_start, gated, weigh_input
    )


def _grouped_matmul(
    x_MH: Tensor,
    codes: Tensor,
    scales: Tensor,
    group_start_E1: Tensor,
    out_MF: Tensor,
    row_M: Tensor | None,
    bias_EF: Tensor | None,
) -> None:
    """Fill the rows of `out_MF` that belong to a group; the others keep what they hold."""
    num_rows, width = out_MF.shape
    num_experts, hidden = codes.shape[0], 2 * codes.shape[2]
    x_MH = unit_last_stride(x_MH)
    tiles = tiles_for(num_rows / num_experts, hidden, width, x_MH.dtype.itemsize)
    most_tiles = min(num_rows, triton.cdiv(num_rows, tiles.block_m) + num_experts)
    _grouped_matmul_kernel[(most_tiles, triton.cdiv(width, tiles.block_f))](
        x_MH,
        codes.contiguous(),
        scales.contiguous(),
        out_MF,
        group_start_E1,
        group_start_E1 if row_M is None else row_M,
        group_start_E1 if bias_EF is None else bias_EF.contiguous(),
        num_experts,
        x_MH.stride(0),
        H=hidden,
        F=width,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_M=tiles.block_m,
        BLOCK_F=tiles.block_f,
        BLOCK_H=tiles.block_h,
        GATHER=row_M is not None,
        HAS_BIAS=bias_EF is not None,
        UPCAST=needs_upcast(x_MH),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )

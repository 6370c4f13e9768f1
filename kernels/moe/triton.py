"""Products grouped by expert and the expert layer in Triton, without asking the device for a count.

The rows are sorted by expert. The grid is as large as any split of the rows could need; each program finds its expert
from the group starts, so nothing waits for the host.

Legend: M rows (T * k of them), T tokens, E experts held here, k chosen experts, H hidden, F output or intermediate
width.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from firstlight.kernels.gated_activation.triton import gated_activation
from firstlight.kernels.moe.reference import plain_activation
from firstlight.kernels.moe.rules import ExpertRules
from firstlight.kernels.packed.decode import ALL, PLAIN, weight_tile
from firstlight.kernels.packed.kinds import CODE_BITS
from firstlight.kernels.packed.matrix import PackedMatrix
from firstlight.kernels.triton_support import dot, needs_upcast, unit_last_stride


@triton.jit
def expert_of_tile(group_start_ptr, num_experts, tile, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """Which expert a tile of rows belongs to, and which of its tiles it is; `num_experts` for one of none."""
    experts = tl.arange(0, BLOCK_E)
    real = experts < num_experts
    sizes = tl.load(group_start_ptr + experts + 1, mask=real, other=0) - tl.load(
        group_start_ptr + experts, mask=real, other=0
    )
    tiles = (sizes + BLOCK_M - 1) // BLOCK_M
    expert = tl.sum(tl.where(tl.cumsum(tiles, 0) <= tile, 1, 0), axis=0)
    return expert, tile - tl.sum(tl.where(experts < expert, tiles, 0), axis=0)


@triton.jit
def _grouped_matmul_kernel(
    x_ptr,
    weight_ptr,  # [E, F, H], or codes of it
    scale_ptr,  # a scale for each block of codes; not read of a plain weight
    zero_ptr,  # a zero point for each scale; not read unless HAS_ZEROS
    outer_ptr,  # a scale of scales for TOGETHER rows each; not read unless OUTER says how
    order_ptr,  # the group of each column, for TOGETHER rows each; not read unless HAS_ORDER
    out_ptr,
    group_start_ptr,
    row_ptr,  # which row of x stands at a sorted place; not read unless GATHER
    bias_ptr,  # [E, F]; not read unless HAS_BIAS
    num_experts,
    x_stride,
    weight_stride_expert,
    weight_stride_row,
    scale_stride_expert,
    scale_stride_row,
    zero_stride_expert,
    zero_stride_row,
    outer_stride_expert,
    order_stride_expert,
    order_stride_row,
    H: tl.constexpr,
    F: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GATHER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
    CODE: tl.constexpr,
    PER_BYTE: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    SCALE_KIND: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    OUTER: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    TOGETHER: tl.constexpr,
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
        expert_64, column_64 = tl.cast(expert, tl.int64), column.to(tl.int64)
        weight_row = weight_ptr + expert_64 * weight_stride_expert + column_64 * weight_stride_row
        scale_row = scale_ptr + expert_64 * scale_stride_expert + column_64 // SCALE_ROWS * scale_stride_row
        zero_row = zero_ptr + expert_64 * zero_stride_expert + column_64 // SCALE_ROWS * zero_stride_row
        outer_row = outer_ptr + expert_64 * outer_stride_expert + column_64 // TOGETHER
        order_row = order_ptr + expert_64 * order_stride_expert + column_64 // TOGETHER * order_stride_row
        acc = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
        for first in range(0, H, BLOCK_H):
            inner = first + depth
            x = tl.load(x_row[:, None] + inner[None, :], mask=is_row[:, None] & (inner < H)[None, :], other=0.0)
            in_weight = (inner < H)[:, None] & (column < F)[None, :]
            weight = weight_tile(
                weight_row[None, :],
                scale_row[None, :],
                zero_row[None, :],
                outer_row[None, :],
                order_row[None, :],
                inner[:, None],
                in_weight,
                x.dtype,
                UPCAST,
                CODE,
                PER_BYTE,
                SCALE_COLUMNS,
                SCALE_KIND,
                HAS_ZEROS,
                OUTER,
                HAS_ORDER,
            )
            acc = dot(x, weight, acc, UPCAST)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + tl.cast(expert, tl.int64) * F + column, mask=column < F, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        out_row = out_ptr + place.to(tl.int64) * F
        is_out = is_row[:, None] & (column < F)[None, :]
        tl.store(out_row[:, None] + column[None, :], acc.to(out_ptr.dtype.element_ty), mask=is_out)


@triton.jit
def _combine_kernel(
    down_ptr,
    place_ptr,  # [T, k]: where a token's j-th expert stands among the sorted rows
    weights_ptr,
    group_start_ptr,
    out_ptr,
    num_experts,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    WEIGH: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    num_local = tl.load(group_start_ptr + num_experts)  # rows after these belong to other ranks and hold nothing
    acc = tl.zeros((BLOCK_H,), tl.float32)
    for j in range(TOP_K):
        place = tl.load(place_ptr + token * TOP_K + j)
        weight = 1.0
        if WEIGH:
            weight = tl.load(weights_ptr + token * TOP_K + j).to(tl.float32)
        is_here = (column < H) & (place < num_local)
        down = tl.load(down_ptr + place * H + column, mask=is_here, other=0.0).to(tl.float32)
        acc += weight * down
    tl.store(out_ptr + token * H + column, acc.to(out_ptr.dtype.element_ty), mask=column < H)


def grouped_matmul(x_MH: Tensor, weight_EFH: Tensor, group_start_E1: Tensor) -> Tensor:
    """Multiply each expert's rows by its own weight (see the reference for the contract)."""
    out_MF = torch.zeros(x_MH.shape[0], weight_EFH.shape[1], dtype=x_MH.dtype, device=x_MH.device)
    return multiply_groups(x_MH, weight_EFH, group_start_E1, out_MF)


def moe(
    x_TH: Tensor,
    ids_Tk: Tensor,
    weights_Tk: Tensor,
    gate_up_E2FH: Tensor | PackedMatrix,
    down_EHF: Tensor | PackedMatrix,
    rules: ExpertRules,
) -> Tensor:
    """Sum each token's chosen experts, weighted (see the reference for the contract), over packed weights as well.

    The down projection is rounded to the dtype of `x_TH` before it is weighted; the sum over experts is float32, in a
    fixed order, so the result does not change from run to run.
    """
    num_local, width = gate_up_E2FH.shape[:2]
    (num_tokens, hidden), top_k = x_TH.shape, ids_Tk.shape[1]
    out_TH = torch.empty(num_tokens, hidden, dtype=x_TH.dtype, device=x_TH.device)
    if num_tokens == 0:
        return out_TH
    expert_M = ids_Tk.flatten() - rules.start
    expert_M = torch.where((expert_M >= 0) & (expert_M < num_local), expert_M, num_local)  # strangers come last
    sorted_M, order_M = torch.sort(expert_M, stable=True)
    group_start_E1 = torch.searchsorted(sorted_M, torch.arange(num_local + 1, device=x_TH.device))
    place_M = torch.empty_like(order_M).scatter_(0, order_M, torch.arange(order_M.numel(), device=x_TH.device))

    num_rows = order_M.numel()
    gate_up_M2F = torch.empty(num_rows, width, dtype=x_TH.dtype, device=x_TH.device)
    row_M = order_M // top_k
    x_MH, gathered_M = x_TH, row_M if not rules.weigh_input else None
    if rules.weigh_input:
        x_MH = (x_TH[row_M] * weights_Tk.flatten()[order_M, None]).to(x_TH.dtype)
    multiply_groups(x_MH, gate_up_E2FH, group_start_E1, gate_up_M2F, gathered_M, rules.gate_up_bias_E2F)
    activate = gated_activation if rules.gated else plain_activation
    hidden_MF = activate(gate_up_M2F, rules.activation)
    down_MH = torch.empty(num_rows, hidden, dtype=x_TH.dtype, device=x_TH.device)
    multiply_groups(hidden_MF, down_EHF, group_start_E1, down_MH, None, rules.down_bias_EH)
    block = min(1024, triton.next_power_of_2(hidden))
    _combine_kernel[(num_tokens, triton.cdiv(hidden, block))](
        down_MH,
        place_M,
        weights_Tk.contiguous(),
        group_start_E1,
        out_TH,
        num_local,
        H=hidden,
        TOP_K=top_k,
        WEIGH=not rules.weigh_input,
        BLOCK_H=block,
    )
    return out_TH


def multiply_groups(
    x_MH: Tensor,
    weight_EFH: Tensor | PackedMatrix,
    group_start_E1: Tensor,
    out_MF: Tensor,
    row_M: Tensor | None = None,
    bias_EF: Tensor | None = None,
) -> Tensor:
    """Fill the rows of `out_MF` that belong to a group; the others keep what they hold.

    `row_M`: which row of x stands at a place (None: the same).
    """
    num_rows, width = out_MF.shape
    num_experts, _, hidden = weight_EFH.shape
    if num_rows == 0:
        return out_MF
    x_MH = unit_last_stride(x_MH)
    held, scales, zeros, outer, order, how = _as_stored(weight_EFH)
    tiles = tiles_for(num_rows / num_experts, hidden, width, x_MH.dtype.itemsize)
    most_tiles = min(num_rows, triton.cdiv(num_rows, tiles.block_m) + num_experts)
    _grouped_matmul_kernel[(most_tiles, triton.cdiv(width, tiles.block_f))](
        x_MH,
        held,
        scales,
        zeros,
        outer,
        order,
        out_MF,
        group_start_E1,
        group_start_E1 if row_M is None else row_M,
        group_start_E1 if bias_EF is None else bias_EF.contiguous(),
        num_experts,
        x_MH.stride(0),
        held.stride(0),
        held.stride(1),
        scales.stride(0),
        scales.stride(1),
        zeros.stride(0),
        zeros.stride(1),
        outer.stride(0),
        order.stride(0),
        order.stride(1),
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
        **how,
    )
    return out_MF


def _as_stored(
    weight_EFH: Tensor | PackedMatrix,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, dict[str, object]]:
    """What holds a weight and what stands beside it (where there is nothing: anything), and how the kernel reads it."""
    if isinstance(weight_EFH, Tensor):
        held = unit_last_stride(weight_EFH)
        return held, held, held, held, held, {"CODE": PLAIN, "PER_BYTE": 1, **_ways(None)}
    one = weight_EFH
    held = unit_last_stride(one.code_bytes)
    scales, zeros, outer, order = (
        held if part is None else part.contiguous() for part in (one.stored_scales, one.zeros, one.outer, one.order)
    )
    return held, scales, zeros, outer, order, {"CODE": one.code, "PER_BYTE": 8 // CODE_BITS[one.code], **_ways(one)}


def _ways(weight: PackedMatrix | None) -> dict[str, object]:
    """What the kernel is told of scales, zero points and orders; None: of a plain weight."""
    rows, columns = (0, 0) if weight is None else weight.block
    has_outer = weight is not None and weight.outer is not None
    return {
        "SCALE_ROWS": rows or ALL,
        "SCALE_COLUMNS": columns or ALL,
        "SCALE_KIND": "float" if weight is None else weight.scale_kind,
        "HAS_ZEROS": weight is not None and weight.zeros is not None,
        "OUTER": "none" if weight is None or not has_outer else "by" if weight.divides else "times",
        "HAS_ORDER": weight is not None and weight.order is not None,
        "TOGETHER": ALL if weight is None else weight.rows_together or ALL,
    }


@dataclass(frozen=True, slots=True)
class Tiles:
    """The block sizes of one launch."""

    block_m: int
    block_f: int
    block_h: int
    num_warps: int
    num_stages: int


def tiles_for(rows_per_expert: float, hidden: int, width: int, itemsize: int) -> Tiles:
    """Choose block sizes for Hopper: few rows read weights in long runs, many rows fill the tensor cores."""
    block_m = 16
    while block_m < 128 and block_m < rows_per_expert:
        block_m *= 2
    if itemsize == 4:
        tiles = Tiles(min(block_m, 64), 64, 32, 4, 2)
    elif block_m <= 32:
        tiles = Tiles(block_m, 64, 128, 4, 4)
    else:
        tiles = Tiles(block_m, 128, 64, 8 if block_m == 128 else 4, 3)
    return Tiles(
        tiles.block_m,
        min(tiles.block_f, max(16, triton.next_power_of_2(width))),
        min(tiles.block_h, max(16, triton.next_power_of_2(hidden))),
        tiles.num_warps,
        tiles.num_stages,
    )

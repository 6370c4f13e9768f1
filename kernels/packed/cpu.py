"""Products with packed weights on CPUs: a tile of rows, or one expert that tokens chose, is unpacked at a time.

Legend: T tokens, E experts held here, H hidden, F output or intermediate width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.kernels.moe.cpu import routed
from firstlight.kernels.moe.rules import ExpertRules
from firstlight.kernels.packed.codes import unpack
from firstlight.kernels.packed.matrix import PackedMatrix

TILE_ELEMENTS = 1 << 20  # 4 MiB in float32: what is unpacked is multiplied while it is in the cache


def linear_packed(x_TH: Tensor, weight_FH: PackedMatrix, bias_F: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias (see the reference for the contract); never more than a tile of the weight is unpacked."""
    return linear_by(unpacked, TILE_ELEMENTS, x_TH, weight_FH, bias_F)


def linear_by(
    numbers: Callable[[PackedMatrix, torch.dtype], Tensor],
    tile_elements: int,
    x_TH: Tensor,
    weight_FH: PackedMatrix,
    bias_F: Tensor | None = None,
) -> Tensor:
    """The same with tiles of about so many elements unpacked by `numbers`."""
    tiles = tuple(weight_FH.tiles(tile_elements))
    if len(tiles) == 1:
        return F.linear(x_TH, numbers(weight_FH, x_TH.dtype), bias_F)
    out = torch.empty(*x_TH.shape[:-1], weight_FH.rows, dtype=x_TH.dtype)
    for start, stop in tiles:
        tile = numbers(weight_FH.part(start, stop), x_TH.dtype)
        out[..., start:stop] = F.linear(x_TH, tile, None if bias_F is None else bias_F[start:stop])
    return out


def unpacked(weight: PackedMatrix, dtype: torch.dtype) -> Tensor:
    """The numbers [R, C] of a matrix in a dtype."""
    return unpack(weight).to(dtype)


def moe_packed(
    x_TH: Tensor,
    ids_Tk: Tensor,
    weights_Tk: Tensor,
    gate_up_E2FH: PackedMatrix,
    down_EHF: PackedMatrix,
    rules: ExpertRules,
) -> Tensor:
    """Sum each token's chosen experts, weighted (see the reference for the contract)."""
    return moe_by(unpacked, x_TH, ids_Tk, weights_Tk, gate_up_E2FH, down_EHF, rules)


def moe_by(
    numbers: Callable[[PackedMatrix, torch.dtype], Tensor],
    x_TH: Tensor,
    ids_Tk: Tensor,
    weights_Tk: Tensor,
    gate_up_E2FH: PackedMatrix,
    down_EHF: PackedMatrix,
    rules: ExpertRules,
) -> Tensor:
    """The same with matrices of chosen experts unpacked by `numbers`."""

    def of_expert(expert: int) -> tuple[Tensor, Tensor]:
        both = gate_up_E2FH.of_expert(expert), down_EHF.of_expert(expert)
        return numbers(both[0], x_TH.dtype), numbers(both[1], x_TH.dtype)

    return routed(x_TH, ids_Tk, weights_Tk, gate_up_E2FH.codes.shape[0], of_expert, rules)

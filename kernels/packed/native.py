"""Products with packed weights on CPUs by our own C++: rows become bfloat16 as fast as memory gives codes.

A tile is unpacked into the cache and multiplied there, by the native linear layer, so that a weight costs little more
than the reading of its codes. Legend: T tokens, E experts held here, H hidden, F output or intermediate width.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.kernels.linear.native import MANY_ROWS, multiplies_as_fast_as_torch
from firstlight.kernels.moe.rules import ExpertRules
from firstlight.kernels.native.build import function
from firstlight.kernels.packed import codes, cpu
from firstlight.kernels.packed.kinds import CODE_BITS
from firstlight.kernels.packed.matrix import PackedMatrix
from firstlight.kernels.packed.reference import numbers_of

TILE_ELEMENTS = 1 << 19  # 1 MiB in bfloat16: what is unpacked is multiplied while it is in the cache
SCALES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
BYTES = 3


def linear_packed(x_TH: Tensor, weight_FH: PackedMatrix, bias_F: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias (see the reference for the contract); never more than a tile of the weight is unpacked."""
    if not is_read(weight_FH):
        return cpu.linear_packed(x_TH, weight_FH, bias_F)
    if x_TH.dim() != 2:
        return linear_packed(x_TH.flatten(0, -2), weight_FH, bias_F).unflatten(0, x_TH.shape[:-1])
    x_TH = x_TH.contiguous()
    (T, H), width = x_TH.shape, weight_FH.rows
    rows = max(1, min(width, TILE_ELEMENTS // max(H, 1)))
    out_TF, tile = x_TH.new_empty(T, width), x_TH.new_empty(rows, H)
    unpacking = _Unpacking(weight_FH)
    for start in range(0, width if T else 0, rows):
        stop = min(start + rows, width)
        part = unpacking.into(tile[: stop - start], start)
        own = None if bias_F is None else bias_F[start:stop]
        _multiply(x_TH, part, own, out_TF[:, start:stop])
    return out_TF


def _multiply(x_TH: Tensor, tile_FH: Tensor, bias_F: Tensor | None, out_TF: Tensor) -> None:
    """A tile's share of the product, into place."""
    (T, H), rows = x_TH.shape, tile_FH.shape[0]
    if T >= MANY_ROWS and not multiplies_as_fast_as_torch():
        out_TF.copy_(F.linear(x_TH, tile_FH, bias_F))
        return
    there_TF = out_TF if out_TF.is_contiguous() else x_TH.new_empty(T, rows)
    bias = None if bias_F is None else bias_F.contiguous().data_ptr()
    function("linear", "ppppllli")(
        tile_FH.data_ptr(), bias, x_TH.data_ptr(), there_TF.data_ptr(), T, rows, H, torch.get_num_threads()
    )
    if there_TF is not out_TF:
        out_TF.copy_(there_TF)


def moe_packed(
    x_TH: Tensor,
    ids_Tk: Tensor,
    weights_Tk: Tensor,
    gate_up_E2FH: PackedMatrix,
    down_EHF: PackedMatrix,
    rules: ExpertRules,
) -> Tensor:
    """Sum each token's chosen experts, weighted (see the reference for the contract)."""
    return cpu.moe_by(unpack, x_TH, ids_Tk, weights_Tk, gate_up_E2FH, down_EHF, rules)


def unpack(weight: PackedMatrix, dtype: torch.dtype) -> Tensor:
    """The numbers [R, C] in bfloat16."""
    assert dtype == torch.bfloat16, dtype
    if not is_read(weight):
        return cpu.unpacked(weight, dtype)
    return _Unpacking(weight).into(torch.empty(weight.shape, dtype=dtype), 0)


def is_read(weight: PackedMatrix) -> bool:
    """Whether the C++ reads it: zero points are int8, and all of it lies in one piece."""
    zeros = weight.zeros is None or weight.zeros.dtype == torch.int8
    scales = weight.scale_kind != "float" or weight.scales.dtype in SCALES
    return zeros and scales and all(part.is_contiguous() for part in weight.parts)


class _Unpacking:
    """A weight and where its parts lie in memory."""

    def __init__(self, weight: PackedMatrix) -> None:
        self._weight = weight  # what the addresses are of
        rows, columns = weight.block
        self._how = torch.tensor(
            [
                weight.columns,
                weight.code_bytes.shape[-1],
                CODE_BITS[weight.code],
                weight.scales.shape[-1],
                rows,
                columns,
                weight.rows_together,
                weight.divides,
                SCALES.get(weight.stored_scales.dtype, BYTES),
            ],
            dtype=torch.int64,
        )
        self._numbers = _numbers(weight.code)
        self._scale_numbers = _numbers(weight.scale_kind) if weight.scale_kind != "float" else None
        self._function = function("unpack", "ppppppppplli")

    def into(self, tile_RC: Tensor, first: int) -> Tensor:
        """Fills a tile with the numbers of rows from `first` on."""
        weight = self._weight
        table, parts = self._scale_numbers, (weight.zeros, weight.outer, weight.order)
        self._function(
            weight.codes.data_ptr(), self._numbers.data_ptr(), weight.scales.data_ptr(),
            None if table is None else table.data_ptr(), *(None if one is None else one.data_ptr() for one in parts),
            tile_RC.data_ptr(), self._how.data_ptr(), first, tile_RC.shape[0], torch.get_num_threads(),
        )  # fmt: skip
        return tile_RC


@lru_cache(maxsize=16)
def _numbers(kind: str) -> Tensor:
    """What each code of a kind stands for, or each scale of a byte."""
    if kind == "e8m0":
        return codes.e8m0(torch.arange(256, dtype=torch.uint8))
    return torch.tensor(numbers_of(kind))

"""Products with packed weights on CPUs by our own C++: rows become bfloat16 as fast as memory gives codes.

A row is unpacked into the nearest cache and multiplied there, so that a weight costs little more than the reading of
its codes; of many tokens a tile at a time is, by torch's product.

Legend: T tokens, E experts held here, H hidden, F output or intermediate width.
"""

from __future__ import annotations

from functools import lru_cache

import torch
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
BYTES = {"e8m0": 3, "e4m3": 4}
KINDS = {"int2": 0, "int4": 1, "e2m1": 1, "int8": 2, "e4m3": 3, "e5m2": 4}


def linear_packed(x_TH: Tensor, weight_FH: PackedMatrix, bias_F: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias (see the reference for the contract); of few tokens each row is unpacked where it is used."""
    if not is_read(weight_FH):
        return cpu.linear_packed(x_TH, weight_FH, bias_F)
    if x_TH.dim() != 2:
        return linear_packed(x_TH.flatten(0, -2), weight_FH, bias_F).unflatten(0, x_TH.shape[:-1])
    if x_TH.shape[0] >= MANY_ROWS and not multiplies_as_fast_as_torch():
        return cpu.linear_by(unpack, TILE_ELEMENTS, x_TH, weight_FH, bias_F)
    x_TH, width = x_TH.contiguous(), weight_FH.rows
    out_TF = x_TH.new_empty(x_TH.shape[0], width)
    arguments = _Arguments(weight_FH)
    bias_F = None if bias_F is None else bias_F.contiguous()
    function("linear_packed", "ppppppppppplli")(
        *arguments.addresses,
        None if bias_F is None else bias_F.data_ptr(),
        x_TH.data_ptr(),
        out_TF.data_ptr(),
        x_TH.shape[0],
        width,
        torch.get_num_threads(),
    )
    return out_TF


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
    out_RC, arguments = torch.empty(weight.shape, dtype=dtype), _Arguments(weight)
    function("unpack", "pppppppppli")(*arguments.addresses, out_RC.data_ptr(), weight.rows, torch.get_num_threads())
    return out_RC


def is_read(weight: PackedMatrix) -> bool:
    """Whether the C++ reads it: zero points are int8, and all of it lies in one piece."""
    zeros = weight.zeros is None or weight.zeros.dtype == torch.int8
    scales = weight.scale_kind != "float" or weight.scales.dtype in SCALES
    return zeros and scales and all(part.is_contiguous() for part in weight.parts)


class _Arguments:
    """A weight as the C++ takes it: `addresses` of its parts, of tables, and of sizes, which stay while this does."""

    def __init__(self, weight: PackedMatrix) -> None:
        rows, columns = weight.block
        sizes = torch.tensor(
            [
                weight.columns,
                weight.code_bytes.shape[-1],
                CODE_BITS[weight.code],
                weight.scales.shape[-1],
                rows,
                columns,
                weight.rows_together,
                weight.divides,
                BYTES[weight.scale_kind] if weight.scale_kind in BYTES else SCALES[weight.scales.dtype],
                KINDS[weight.code],
            ],
            dtype=torch.int64,
        )
        table = None if weight.scale_kind == "float" else _numbers(weight.scale_kind)
        beside = (table, weight.zeros, weight.outer, weight.order, sizes)
        self._held = (weight.codes, _numbers(weight.code), weight.scales, *beside)

    @property
    def addresses(self) -> tuple[int | None, ...]:
        return tuple(None if one is None else one.data_ptr() for one in self._held)


@lru_cache(maxsize=16)
def _numbers(kind: str) -> Tensor:
    """What each code of a kind stands for, or each scale of a byte."""
    if kind == "e8m0":
        return codes.e8m0(torch.arange(256, dtype=torch.uint8))
    return torch.tensor(numbers_of(kind))

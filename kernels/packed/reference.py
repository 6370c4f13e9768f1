"""Reference of products with packed weights: a table of all codes, numbers in float32, then the plain reference.

Legend: T tokens, E experts held here, R rows and C columns of a weight, H hidden, F output or intermediate width.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from firstlight.kernels.moe import reference as plain
from firstlight.kernels.moe.rules import ExpertRules
from firstlight.kernels.packed.kinds import CODE_BITS
from firstlight.kernels.packed.matrix import PackedMatrix


def linear_packed(x_TH: Tensor, weight_FH: PackedMatrix, bias_F: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, [T, F] in the dtype of x: the weight's numbers rounded to it, the sum in float32."""
    numbers = unpack(weight_FH).to(x_TH.dtype).float()
    out = x_TH.float() @ numbers.T
    return (out if bias_F is None else out + bias_F.float()).to(x_TH.dtype)


def moe_packed(
    x_TH: Tensor,
    ids_Tk: Tensor,
    weights_Tk: Tensor,
    gate_up_E2FH: PackedMatrix,
    down_EHF: PackedMatrix,
    rules: ExpertRules,
) -> Tensor:
    """Sum each token's chosen experts, weighted, as `moe` does with the numbers that codes and scales stand for."""
    gate_up, down = unpack(gate_up_E2FH).to(x_TH.dtype), unpack(down_EHF).to(x_TH.dtype)
    return plain.moe(x_TH, ids_Tk, weights_Tk, gate_up, down, rules)


def unpack(weight: PackedMatrix) -> Tensor:
    """The numbers [..., R, C], float32: every code looked up, every element with the scale of its block."""
    raw, bits = weight.code_bytes.long(), CODE_BITS[weight.code]
    raw = torch.stack([(raw >> place) & ((1 << bits) - 1) for place in range(0, 8, bits)], dim=-1).flatten(-2)
    table = torch.tensor(numbers_of(weight.code), device=raw.device)
    numbers = table[raw[..., : weight.columns]]
    if weight.zeros is not None:
        numbers = numbers - _each(weight, weight.zeros.float())
    return numbers * _factors(weight)


@lru_cache(maxsize=8)
def numbers_of(code: str) -> tuple[float, ...]:
    """What the codes 0 to 2^bits - 1 stand for, by the formula of the format."""
    count = 1 << CODE_BITS[code]
    if code in ("int2", "int4"):
        return tuple(float(index - count // 2) for index in range(count))
    if code == "int8":
        return tuple(float((index + 128) % 256 - 128) for index in range(count))
    mantissa_bits, bias = {"e2m1": (1, 1), "e4m3": (3, 7), "e5m2": (2, 15)}[code]
    return tuple(_float_of(index, count.bit_length() - 1, mantissa_bits, bias, code) for index in range(count))


def _float_of(index: int, bits: int, mantissa_bits: int, bias: int, code: str) -> float:
    sign = -1.0 if index >> (bits - 1) else 1.0
    mantissa = index & ((1 << mantissa_bits) - 1)
    exponent = (index >> mantissa_bits) & ((1 << (bits - 1 - mantissa_bits)) - 1)
    if code == "e4m3" and index & 0x7F == 0x7F:
        return float("nan")
    if code == "e5m2" and exponent == 31:
        return float("nan") if mantissa else sign * float("inf")
    whole = 0.0 if exponent == 0 else 1.0
    return sign * (whole + mantissa / (1 << mantissa_bits)) * 2.0 ** (max(exponent, 1) - bias)


def _factors(weight: PackedMatrix) -> Tensor:
    """The scale of each element, float32 [..., R, C] or what broadcasts to it."""
    found = weight.stored_scales
    if weight.scale_kind == "e8m0":
        exponents = found.int()
        bits = torch.where(exponents == 0, 1 << 22, exponents << 23)  # 2^-127 is below the normal numbers
        found = torch.where(exponents == 255, 0x7FC00000, bits).view(torch.float32)
    elif weight.scale_kind == "e4m3":
        found = torch.tensor(numbers_of("e4m3"), device=found.device)[found.long()]
    found = _each(weight, found.float())
    if weight.outer is None:
        return found
    outer = _of_rows(weight, weight.outer, weight.rows_together)
    return found / outer if weight.divides else found * outer


def _each(weight: PackedMatrix, found: Tensor) -> Tensor:
    """What is given per block of each element, [..., R, C] or what broadcasts to it."""
    found, size = _of_rows(weight, found, weight.block[0]), weight.block[1]
    if weight.order is not None:
        order = _of_rows(weight, weight.order, weight.rows_together).expand(*weight.shape).long()
        return found.expand(*weight.shape[:-1], found.shape[-1]).gather(-1, order)
    return found.index_select(-1, torch.arange(weight.columns, device=found.device) // size) if size else found


def _of_rows(weight: PackedMatrix, found: Tensor, size: int) -> Tensor:
    """What is given per `size` rows, for each row."""
    return found.index_select(-2, torch.arange(weight.rows, device=found.device) // size) if size else found

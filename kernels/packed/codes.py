"""Codes and scales as float32, by their bits: exact, and fast on CPUs.

Source of the number formats: OCP Microscaling Formats (MX) v1.0, section 5; OCP 8-bit Floating Point (OFP8) v1.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from firstlight.kernels.packed.matrix import PackedMatrix


def e2m1(packed: Tensor) -> Tensor:
    """Bytes [..., n] -> float32 [..., 2n]: two codes a byte, the low one first.

    A code's three bits stand where float16 has its exponent and mantissa, and its exponent is 14 less.
    """
    bits = packed.view(torch.uint8).to(torch.int16)
    low = ((bits & 0x07) << 9) | ((bits & 0x08) << 12)
    high = ((bits & 0x70) << 5) | ((bits & 0x80) << 8)
    return torch.stack((low, high), dim=-1).flatten(-2).view(torch.float16).float().mul_(2.0**14)


def int4(packed: Tensor) -> Tensor:
    """Bytes [..., n] -> float32 [..., 2n]: numbers -8 to 7, stored with 8 added, two a byte, the low one first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).float().sub_(8.0)


def int2(packed: Tensor) -> Tensor:
    """Bytes [..., n] -> float32 [..., 4n]: numbers -2 to 1, stored with 2 added, four a byte, the lowest first."""
    parts = [(packed >> shift) & 3 for shift in range(0, 8, 2)]
    return torch.stack(parts, dim=-1).flatten(-2).float().sub_(2.0)


def fp8(codes: Tensor) -> Tensor:
    """8-bit floats -> float32, exactly; by way of float16, whose conversion is fast on every device."""
    if codes.dtype == torch.float8_e5m2:
        return (codes.view(torch.uint8).to(torch.int16) << 8).view(torch.float16).float()
    raw = codes.view(torch.uint8)
    if codes.dtype != torch.float8_e4m3fn or bool(((raw & 0x7F) == 0x7F).any()):  # NaN
        return codes.float()
    bits = raw.to(torch.int16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).view(torch.float16).float().mul_(2.0**8)


def e8m0(stored: Tensor) -> Tensor:
    """Bytes -> float32 2^(byte - 127), the smallest subnormal and exact; 255 is NaN."""
    codes = stored.view(torch.uint8).int()
    bits = torch.where(codes == 0, 1 << 22, codes << 23)
    return torch.where(codes == 255, 0x7FC00000, bits).view(torch.float32)


def unpack(weight: PackedMatrix) -> Tensor:
    """The numbers [R, C], float32, of a matrix or of a part of one."""
    numbers = _numbers(weight)
    scales, block = _scales(weight), weight.block
    zeros = None if weight.zeros is None else weight.zeros.float()
    if weight.order is not None:
        scales, block = _of_columns(weight, scales), (block[0], 1)
        zeros = None if zeros is None else _of_columns(weight, zeros)
    if zeros is not None:
        _with_blocks(numbers, zeros, block, Tensor.sub_)
    return _with_blocks(numbers, scales, block, Tensor.mul_)


def _scales(weight: PackedMatrix) -> Tensor:
    """The scales as float32, multiplied or divided by their own where they have one."""
    stored = weight.stored_scales
    if weight.scale_kind == "float":
        scales = stored.float()
    else:
        scales = e8m0(stored) if weight.scale_kind == "e8m0" else fp8(stored.view(torch.float8_e4m3fn))
    if weight.outer is None:
        return scales
    outer = _each_row(weight, weight.outer, scales.shape[-2])
    return scales / outer if weight.divides else scales * outer


def _each_row(weight: PackedMatrix, part: Tensor, count: int) -> Tensor:
    """What rows have together, [n, m], for each of `count` rows of scales; as it is where all have one."""
    if part.shape[-2] == 1:
        return part
    rows = torch.arange(count, device=part.device) * max(weight.block[0], 1)
    return part.index_select(-2, rows // weight.rows_together)


def _of_columns(weight: PackedMatrix, each: Tensor) -> Tensor:
    """What is given for each group, [r, G], for each column, [r, C]."""
    assert weight.order is not None
    if weight.order.shape[-2] == 1:
        return each.index_select(-1, weight.order.flatten())
    return each.gather(-1, _each_row(weight, weight.order, each.shape[-2]).long())


def _with_blocks(
    numbers: Tensor, each: Tensor, block: tuple[int, int], combine: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Combines numbers, in place, with what is given per block; whole blocks are broadcast over."""
    over = numbers
    for dim, at in ((-1, -1), (-2, -2)):
        size, length = block[dim], numbers.shape[dim]
        at = at if over is numbers else at - 1
        if size > 1 and length % size == 0:
            over, each = over.unflatten(at, (-1, size)), each.unsqueeze(at)
        elif size > 1:
            each = each.repeat_interleave(size, at).narrow(at, 0, length)
    combine(over, each)
    return numbers


def _numbers(weight: PackedMatrix) -> Tensor:
    raw = weight.code_bytes
    if weight.code in NARROW:
        numbers = NARROW[weight.code](raw)
        return numbers[..., : weight.columns] if numbers.shape[-1] > weight.columns else numbers
    raw = raw[..., : weight.columns]
    if weight.code == "int8":
        return raw.view(torch.int8).float()
    return fp8(raw.view(torch.float8_e4m3fn if weight.code == "e4m3" else torch.float8_e5m2))


NARROW: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({"e2m1": e2m1, "int2": int2, "int4": int4})

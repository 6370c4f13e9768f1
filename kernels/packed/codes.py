"""Codes and scales as float32, by their bits: exact, and fast on CPUs.

Source of the number formats: OCP Microscaling Formats (MX) v1.0, section 5; OCP 8-bit Floating Point (OFP8) v1.0.
"""

from __future__ import annotations

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
    scales = e8m0(weight.stored_scales) if weight.has_exponents else weight.scales.float()
    over = numbers
    for dim, at in ((-1, -1), (-2, -2)):
        size, length = weight.block[dim], numbers.shape[dim]
        at = at if over is numbers else at - 1
        if size > 1 and length % size == 0:
            over, scales = over.unflatten(at, (-1, size)), scales.unsqueeze(at)
        elif size > 1:
            scales = scales.repeat_interleave(size, at).narrow(at, 0, length)
    over.mul_(scales)
    return numbers


def _numbers(weight: PackedMatrix) -> Tensor:
    raw = weight.code_bytes
    if weight.code in ("e2m1", "int4"):
        numbers = (e2m1 if weight.code == "e2m1" else int4)(raw)
        return numbers[..., : weight.columns] if numbers.shape[-1] > weight.columns else numbers
    raw = raw[..., : weight.columns]
    if weight.code == "int8":
        return raw.view(torch.int8).float()
    return fp8(raw.view(torch.float8_e4m3fn if weight.code == "e4m3" else torch.float8_e5m2))

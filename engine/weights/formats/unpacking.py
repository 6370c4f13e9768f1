"""Tensor operations that storage formats share: codes out of bytes and words, scales spread over their blocks.

Source of the number formats: OCP Microscaling Formats (MX) v1.0, section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def e2m1(packed: Tensor) -> Tensor:
    """Bytes [..., n] -> float32 [..., 2n]: two codes a byte, the low one first.

    A code's three bits stand where float16 has its exponent and mantissa, and its exponent is 14 less.
    """
    bits = packed.view(torch.uint8).to(torch.int16)
    low = ((bits & 0x07) << 9) | ((bits & 0x08) << 12)
    high = ((bits & 0x70) << 5) | ((bits & 0x80) << 8)
    return torch.stack((low, high), dim=-1).flatten(-2).view(torch.float16).float().mul_(2.0**14)


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


def scale32(stored: Tensor) -> Tensor:
    """A scale as float32; bytes and E8M0 are exponents."""
    is_exponent = stored.dtype in (torch.uint8, torch.float8_e8m0fnu)
    return e8m0(stored) if is_exponent else stored.float()


def codes(words: Tensor, bits: int) -> Tensor:
    """32-bit words [..., n] -> codes [..., n x (32 / bits)], uint8, lowest bits first."""
    packed = words.contiguous().view(torch.uint8)
    if bits == 8:
        return packed
    parts = [(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, dim=-1).flatten(-2)


def codes_down(words: Tensor, bits: int) -> Tensor:
    """32-bit words [..., n, m] -> codes [..., n x (32 / bits), m], uint8: packed along the dim before the last."""
    parts = [((words >> shift) & ((1 << bits) - 1)).to(torch.uint8) for shift in range(0, 32, bits)]
    return torch.stack(parts, dim=-2).flatten(-3, -2)


def span(values: Tensor, dim: int, bounds: tuple[int, int], block: int) -> Tensor:
    """[start, stop) along `dim` of values that begin at the last multiple of `block` up to start."""
    start, stop = bounds
    return values.narrow(dim, start % block, stop - start)


def spread(values: Tensor, dim: int, bounds: tuple[int, int], block: int) -> Tensor:
    """One value for each element of [start, stop) along `dim`, from one a block; `block` 0: one for all."""
    if block == 0 or values.shape[dim] == 1 or block == 1:
        return values  # broadcasts, or is one for one
    return span(values.repeat_interleave(block, dim), dim, bounds, block)


def scaled(values: Tensor, scales: Tensor, box: Sequence[tuple[int, int]], block: tuple[int, int]) -> Tensor:
    """values * scales, in place, float32 [..., rows, columns], one scale a block (rows, columns) of the weight."""
    return _with_blocks(values, scales, box, block, Tensor.mul_)


def shifted(values: Tensor, zeros: Tensor, box: Sequence[tuple[int, int]], block: tuple[int, int]) -> Tensor:
    """values - zeros, in place, one zero point a block."""
    return _with_blocks(values, zeros, box, block, Tensor.sub_)


def _with_blocks(
    values: Tensor,
    each: Tensor,
    box: Sequence[tuple[int, int]],
    block: tuple[int, int],
    combine: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Combines values with what is given per block [..., rows, columns]; whole blocks are broadcast over."""
    over = values
    for dim in (-1, -2):
        at, size = dim if over is values else dim - 1, block[dim]
        if size > 1 and not box[dim][0] % size and not values.shape[dim] % size:
            over, each = over.unflatten(at, (-1, size)), each.unsqueeze(at)
        else:
            each = spread(each, at, box[dim], size)
    combine(over, each)
    return values


def of_groups(each: Tensor, order: Tensor, dim: int = -1) -> Tensor:
    """What is given per group along `dim` (-1 or -2) for each input, whose groups are `order` [..., inputs]."""
    if order.dim() == 1:
        return each.index_select(dim, order)
    return torch.take_along_dim(each, order.long().unsqueeze(-2 if dim == -1 else -1), dim=dim)

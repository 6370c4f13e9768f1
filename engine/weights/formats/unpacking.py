"""Tensor operations that storage formats share: codes out of bytes and words, scales spread over their blocks.

Source of the number formats: OCP Microscaling Formats (MX) v1.0, section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from firstlight.kernels.packed.codes import e2m1, e8m0, fp8

__all__ = [
    "codes",
    "codes_down",
    "divided",
    "e2m1",
    "e8m0",
    "fp8",
    "of_groups",
    "row_bytes",
    "scale32",
    "scaled",
    "shifted",
    "span",
    "spread",
    "turned_codes",
    "zero_points",
]


def scale32(stored: Tensor) -> Tensor:
    """A scale as float32; bytes and E8M0 are exponents."""
    is_exponent = stored.dtype in (torch.uint8, torch.float8_e8m0fnu)
    return e8m0(stored) if is_exponent else stored.float()


def codes(words: Tensor, bits: int) -> Tensor:
    """32-bit words [..., n] -> codes [..., n x (32 / bits)], uint8, lowest bits first."""
    if 32 % bits:
        return _over_edges(words.unsqueeze(-1), bits).squeeze(-1)
    packed = words.contiguous().view(torch.uint8)
    if bits == 8:
        return packed
    parts = [(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, dim=-1).flatten(-2)


def row_bytes(stored: Tensor, columns: tuple[int, int], block: int, bits: int) -> Tensor:
    """Bytes of the codes of columns [start, stop), from rows that begin at the last multiple of `block` up to start."""
    start, stop = columns
    first = start % block * bits // 8
    packed = stored.contiguous().view(torch.uint8)
    return packed.narrow(-1, first, -(-(stop - start) * bits // 8))


def turned_codes(each: Tensor, bits: int) -> Tensor:
    """Codes [..., columns, rows], one a byte -> bytes [..., rows, ceil(columns x bits / 8)], the first one lowest."""
    per_byte = 8 // bits
    padded = torch.nn.functional.pad(each, (0, 0, 0, -each.shape[-2] % per_byte))
    parts = padded.unflatten(-2, (-1, per_byte)).unbind(-2)
    found = parts[0].clone()
    for place, part in enumerate(parts[1:], 1):
        found |= part << (place * bits)
    return found.mT.contiguous()


def zero_points(each: Tensor, bits: int) -> Tensor:
    """Zero points of codes, less the middle of these: int8."""
    return (each.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)


def codes_down(words: Tensor, bits: int) -> Tensor:
    """32-bit words [..., n, m] -> codes [..., n x (32 / bits), m], uint8: packed along the dim before the last."""
    if 32 % bits:
        return _over_edges(words, bits)
    parts = [((words >> shift) & ((1 << bits) - 1)).to(torch.uint8) for shift in range(0, 32, bits)]
    return torch.stack(parts, dim=-2).flatten(-3, -2)


def _over_edges(words: Tensor, bits: int) -> Tensor:
    """Words [..., n x bits, m] -> codes [..., n x 32, m], uint8, of a width that lies over the edges of words."""
    parts, most = words.unflatten(-2, (-1, bits)).unbind(-2), (1 << bits) - 1
    found = []
    for bit in range(0, 32 * bits, bits):
        word, place = divmod(bit, 32)
        code, there = parts[word] >> place & (most if place + bits <= 32 else (1 << (32 - place)) - 1), 32 - place
        found.append(code if there >= bits else code | (parts[word + 1] & ((1 << (bits - there)) - 1)) << there)
    return torch.stack(found, dim=-2).to(torch.uint8).flatten(-3, -2)


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


def divided(values: Tensor, scales: Tensor, box: Sequence[tuple[int, int]], block: tuple[int, int]) -> Tensor:
    """values / scales, in place, one scale a block."""
    return _with_blocks(values, scales, box, block, Tensor.div_)


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

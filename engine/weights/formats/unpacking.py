"""Tensor operations that storage formats share: codes out of bytes and words, scales spread over their blocks.

Source of the number formats: OCP Microscaling Formats (MX) v1.0, section 5.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def e2m1(packed: Tensor) -> Tensor:
    """Bytes [..., n] -> float32 [..., 2n]: two codes a byte, the low one first."""
    values = torch.tensor(E2M1, dtype=torch.float32, device=packed.device)
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=1)  # byte -> low, high
    return pairs[packed.view(torch.uint8).int()].flatten(-2)


def e8m0(stored: Tensor) -> Tensor:
    """Bytes -> float32 2^(byte - 127), the smallest subnormal and exact; 255 is NaN."""
    codes = stored.view(torch.uint8).int()
    bits = torch.where(codes == 0, 1 << 22, codes << 23)
    return torch.where(codes == 255, 0x7FC00000, bits).view(torch.float32)


def scale32(stored: Tensor) -> Tensor:
    """A scale as float32; bytes and E8M0 are exponents."""
    is_exponent = stored.dtype in (torch.uint8, torch.float8_e8m0fnu)
    return e8m0(stored) if is_exponent else stored.float()


def codes(words: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Words [..., n], int32 -> int32 codes [..., n x (32 / bits)], lowest bits first.

    `order`: code i is the `order[i]`-th of its word.
    """
    per_word = 32 // bits
    shifts = torch.tensor([bits * place for place in order or range(per_word)], dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)


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
    return values.mul_(_over(scales, box, block))


def shifted(values: Tensor, zeros: Tensor, box: Sequence[tuple[int, int]], block: tuple[int, int]) -> Tensor:
    """values - zeros, in place, one zero point a block."""
    return values.sub_(_over(zeros, box, block))


def _over(each: Tensor, box: Sequence[tuple[int, int]], block: tuple[int, int]) -> Tensor:
    """What is given per block [..., rows, columns], spread over the values."""
    return spread(spread(each, -2, box[-2], block[0]), -1, box[-1], block[1])


def of_groups(each: Tensor, order: Tensor) -> Tensor:
    """What is given per group [..., rows, groups] for each input, whose groups are `order` [..., inputs]."""
    return torch.take_along_dim(each, order.long().unsqueeze(-2), dim=-1)

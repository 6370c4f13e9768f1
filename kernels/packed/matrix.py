"""A weight that stays packed: codes as they are stored, and a scale for each block of them.

One description serves every storage format whose numbers are code x scale, whatever it is called: a format says which
codes it has and how large its blocks are, and nothing else has to be written for it.
Legend: E experts, R rows (outputs), C columns (inputs).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

CODE_BITS: Mapping[str, int] = MappingProxyType({"e2m1": 4, "int4": 4, "int8": 8, "e4m3": 8, "e5m2": 8})
"""Kinds of codes. `int4` is stored as number + 8; codes of four bits stand two a byte, the even column low."""

WHOLE = 0  # of a block: one scale for all rows, or all columns


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Numbers [..., R, C] as `codes` (see `CODE_BITS`) and `scales`, one for each block of (rows, columns).

    `codes` [..., R, bytes of a row] of any one-byte dtype or of 32-bit words, little-endian; `scales`
    [..., ceil(R / rows), ceil(C / columns)], floats, or bytes s that stand for 2^(s - 127) with 255 for NaN (E8M0).
    `...` is nothing, or the experts. A number is code x scale in float32, rounded once to the dtype that multiplies.
    """

    codes: Tensor
    scales: Tensor
    code: str
    block: tuple[int, int]
    columns: int

    def __post_init__(self) -> None:
        if self.code not in CODE_BITS:
            raise ValueError(f"no codes are called {self.code}; there are {', '.join(CODE_BITS)}")
        rows, columns = self.block
        wanted = (-(-self.rows // rows) if rows else 1, -(-self.columns // columns) if columns else 1)
        if tuple(self.scales.shape) != (*self.codes.shape[:-2], *wanted):
            raise ValueError(f"scales {list(self.scales.shape)} for codes {list(self.codes.shape)}: {wanted} expected")
        if self.codes.shape[-1] * self.codes.element_size() * 8 < self.columns * CODE_BITS[self.code]:
            raise ValueError(f"codes {list(self.codes.shape)} are too few for {self.columns} columns")

    @property
    def rows(self) -> int:
        return self.codes.shape[-2]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the numbers."""
        return (*self.codes.shape[:-1], self.columns)

    @property
    def code_bytes(self) -> Tensor:
        """The codes as bytes [..., R, bytes of a row]."""
        return self.codes.view(torch.uint8)

    @property
    def has_exponents(self) -> bool:
        """Whether scales are powers of two, a byte each."""
        return self.scales.dtype in (torch.uint8, torch.float8_e8m0fnu)

    @property
    def stored_scales(self) -> Tensor:
        """The scales as floats of any width, or as bytes."""
        return self.scales.view(torch.uint8) if self.has_exponents else self.scales

    def as_expert(self) -> PackedMatrix:
        """A matrix [R, C] as those [1, R, C] of a single expert."""
        return replace(self, codes=self.codes.unsqueeze(0), scales=self.scales.unsqueeze(0))

    def of_expert(self, expert: int) -> PackedMatrix:
        """The matrix [R, C] of one expert."""
        return replace(self, codes=self.codes[expert], scales=self.scales[expert])

    def part(self, start: int, stop: int) -> PackedMatrix:
        """Rows [start, stop), of which the first is the first of a block."""
        rows = self.block[0]
        assert not start % max(rows, 1), (start, self.block)
        scales = self.scales if not rows else self.scales[..., start // rows : -(-stop // rows), :]
        return replace(self, codes=self.codes[..., start:stop, :], scales=scales)

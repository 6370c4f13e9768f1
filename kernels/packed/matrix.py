"""A weight that stays packed: codes, a scale for each block of them, and what else a storage format has beside these.

One description serves every storage format whose numbers are (code - zero point) x scale, whatever it is called: a
format says which codes it has, how large its blocks are and what there is, and nothing else has to be written for it.
Legend: E experts, R rows (outputs), C columns (inputs), G groups of columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from firstlight.kernels.packed.kinds import CODE_BITS

WHOLE = 0  # of a block: one scale for all rows, or all columns
EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Numbers [..., R, C] as `codes` (see `CODE_BITS`) and `scales`, one for each `block` of (rows, columns).

    `codes` [..., R, bytes of a row] of any one-byte dtype or of 32-bit words, little-endian; `scales`
    [..., ceil(R / rows), ceil(C / columns)], floats of 8 bits or more, or bytes s that stand for 2^(s - 127) with 255
    for NaN (E8M0). `...` is nothing, or the experts. `zeros`, of the shape of the scales: what codes stand for is less
    by these. `outer` [..., n, 1], float32: scales are multiplied by it, or divided if `divides`, in float32.
    `order` [..., n, C]: which group a column is in, so that scales are [..., ceil(R / rows), G]. The n of both are one
    for `rows` rows each. A number is (code - zero) x scale in float32, rounded once to the dtype that multiplies.
    """

    codes: Tensor
    scales: Tensor
    code: str
    block: tuple[int, int]
    columns: int
    zeros: Tensor | None = None
    outer: Tensor | None = None
    divides: bool = False
    order: Tensor | None = None
    rows_together: int = WHOLE

    def __post_init__(self) -> None:
        if self.code not in CODE_BITS:
            raise ValueError(f"no codes are called {self.code}; there are {', '.join(CODE_BITS)}")
        rows, columns = self.block
        groups = self.scales.shape[-1] if self.order is not None else _blocks(self.columns, columns)
        grid, together = (_blocks(self.rows, rows), groups), _blocks(self.rows, self.rows_together)
        parts = (
            ("scales", self.scales, grid),
            ("zero points", self.zeros, grid),
            ("outer scales", self.outer, (together, 1)),
            ("orders", self.order, (together, self.columns)),
        )
        for what, part, wanted in parts:
            if part is not None and tuple(part.shape) != (*self.codes.shape[:-2], *wanted):
                raise ValueError(f"{what} {list(part.shape)} for codes {list(self.codes.shape)}: {wanted} expected")
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
    def scale_kind(self) -> str:
        """How scales are read: `e8m0`, powers of two, a byte each, `e4m3`, of 8 bits as well, or `float`."""
        if self.scales.dtype in EXPONENTS:
            return "e8m0"
        return "e4m3" if self.scales.dtype == torch.float8_e4m3fn else "float"

    @property
    def stored_scales(self) -> Tensor:
        """The scales as floats of any width, or as bytes."""
        return self.scales if self.scale_kind == "float" else self.scales.view(torch.uint8)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Every tensor of it."""
        found = (self.code_bytes, self.stored_scales, self.zeros, self.outer, self.order)
        return tuple(part for part in found if part is not None)

    def as_expert(self) -> PackedMatrix:
        """A matrix [R, C] as those [1, R, C] of a single expert."""
        return self._each(lambda part: part.unsqueeze(0))

    def of_expert(self, expert: int) -> PackedMatrix:
        """The matrix [R, C] of one expert."""
        return self._each(lambda part: part[expert])

    def _each(self, change: Callable[[Tensor], Tensor]) -> PackedMatrix:
        zeros, outer, order = (None if one is None else change(one) for one in (self.zeros, self.outer, self.order))
        return replace(
            self, codes=change(self.codes), scales=change(self.scales), zeros=zeros, outer=outer, order=order
        )

    def in_order(self) -> PackedMatrix:
        """The same without an order, where columns are in their groups one after the other as it is."""
        size = self.block[1]
        if self.order is None or self.scales.shape[-1] != _blocks(self.columns, size):
            return self
        plain = torch.arange(self.columns, device=self.order.device) // size
        return replace(self, order=None) if bool((self.order == plain).all()) else self

    def part(self, start: int, stop: int) -> PackedMatrix:
        """Rows [start, stop), of which the first is the first of a block, and which have an order in common."""
        rows, together = self.block[0], self.rows_together
        assert not start % max(rows, 1), (start, self.block)
        assert not together or start // together == (stop - 1) // together, (start, stop, together)

        def of_rows(part: Tensor | None, size: int, last: int) -> Tensor | None:
            return part if part is None or not size else part[..., start // size : last, :]

        blocks = -(-stop // rows) if rows else 1
        scales = of_rows(self.scales, rows, blocks)
        assert scales is not None
        one = start // together + 1 if together else 1
        return replace(
            self,
            codes=self.codes[..., start:stop, :],
            scales=scales,
            zeros=of_rows(self.zeros, rows, blocks),
            outer=of_rows(self.outer, together, one),
            order=of_rows(self.order, together, one),
            rows_together=WHOLE,
        )

    def tiles(self, elements: int) -> Iterator[tuple[int, int]]:
        """Rows [start, stop) one part after the other, each of about so many numbers: what `part` takes."""
        unit = max(self.block[0], 1)
        most = max(unit, elements // max(self.columns, 1) // unit * unit)
        start = 0
        while start < self.rows:
            together = self.rows_together
            end = min(self.rows, (start // together + 1) * together) if together else self.rows
            yield start, min(start + most, end)
            start = min(start + most, end)


def _blocks(size: int, block: int) -> int:
    return math.ceil(size / block) if block else 1

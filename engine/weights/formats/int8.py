"""W8A8: int8 weights with a scale per row, per tensor, or per group (compressed-tensors `int-quantized`).

`weight` I8 [F, H], `weight_scale` [F, 1] or one, and where it is not symmetric `weight_zero_point` of the same shape:
a number is (code - zero point) x scale, computed in float32. Activations are not quantized here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from firstlight.engine.weights.formats.fp8 import block_words
from firstlight.engine.weights.formats.grid import (
    COLUMNS,
    ROWS,
    SCALES,
    WHOLE,
    Axis,
    Box,
    Format,
    Packing,
    Part,
    as_grid,
    blocked,
    spellings,
)

if TYPE_CHECKING:
    from torch import Tensor


class Int8(Format, frozen=True, kw_only=True):
    """One scale, and perhaps a zero point, for each block of (rows, columns)."""

    block: tuple[int, int] = (1, WHOLE)
    zero_point: bool = False
    dims: tuple[Axis | int, ...] | None = None

    label: ClassVar[str] = "INT8"

    @property
    def parts(self) -> tuple[Part, ...]:
        dims = blocked(self.block) if self.dims is None else self.dims
        found = (
            Part("codes", "weight", ("I8",), (Axis(ROWS), Axis(COLUMNS))),
            Part("scale", "weight_scale", ("BF16", "F32", "F16", "F64"), dims),
        )
        return (*found, Part("zero", "weight_zero_point", ("I8", *SCALES), dims)) if self.zero_point else found

    def variants(self) -> tuple[Format, ...]:
        blocks = (self.block,) if self.block[1] else dict.fromkeys((self.block, (1, WHOLE), (WHOLE, WHOLE)))
        return tuple(
            Int8(block=block, zero_point=zero_point, dims=dims)
            for block in blocks
            for zero_point in dict.fromkeys((self.zero_point, True))  # where they are announced they must be there
            for dims in spellings(block)
        )

    def packing(self, codes: str) -> Packing:
        return Packing("int8", self.block, zero=self.zero_point)

    def lies(self, role: str) -> bool:
        return True

    def laid(self, role: str, stored: Tensor, box: Box) -> Tensor:
        return stored if role == "codes" else as_grid(stored, self.parts[1].dims)

    def unpack(self, stored: Mapping[str, Tensor], box: Box, shape: tuple[int, ...]) -> Tensor:
        from firstlight.engine.weights.formats.unpacking import scaled, shifted

        values, dims = stored["codes"].float(), self.parts[1].dims
        if self.zero_point:
            values = shifted(values, as_grid(stored["zero"].float(), dims), box, self.block)
        return scaled(values, as_grid(stored["scale"].float(), dims), box, self.block)

    def describe(self) -> str:
        return f"{self.label}, {block_words(self.block)}" + (", zero points" if self.zero_point else "")

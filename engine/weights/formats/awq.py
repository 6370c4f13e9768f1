"""AWQ (arXiv 2306.00978), its GEMM layout: 4-bit integers, eight a word along the outputs, in an order of its own.

`qweight` I32 [H, F / 8], `qzeros` I32 [H / group, F / 8], `scales` F16 [H / group, F]. Code i of a word stands at place
(0, 4, 1, 5, 2, 6, 3, 7)[i] of it. A number is (code - zero) x scale, in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from firstlight.engine.weights.formats.grid import COLUMNS, ROWS, Axis, Box, Format, Part

if TYPE_CHECKING:
    from torch import Tensor

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
BITS, PER_WORD = 4, 8


class Awq(Format, frozen=True, kw_only=True):
    """`group` inputs share a scale and a zero point; `WHOLE`: all of them."""

    group: int = 128

    label: ClassVar[str] = "AWQ INT4"

    @property
    def parts(self) -> tuple[Part, ...]:
        groups = Axis(COLUMNS, self.group) if self.group else 1
        words = Axis(ROWS, PER_WORD)
        return (
            Part("codes", "qweight", ("I32",), (Axis(COLUMNS), words)),
            Part("zero", "qzeros", ("I32",), (groups, words)),
            Part("scale", "scales", ("F16", "BF16", "F32"), (groups, Axis(ROWS))),
        )

    def unpack(self, stored: Mapping[str, Tensor], box: Box, shape: tuple[int, ...]) -> Tensor:
        from firstlight.engine.weights.formats.unpacking import codes, scaled, shifted, span

        turned, block = (*box[:ROWS], box[COLUMNS], box[ROWS]), (self.group, 1)
        values, zero = (
            span(in_order(codes(stored[role], BITS)), -1, box[ROWS], PER_WORD).float() for role in ("codes", "zero")
        )
        return scaled(shifted(values, zero, turned, block), stored["scale"].float(), turned, block).mT

    def hindrance(self, codes: str) -> str:
        return "words hold codes of several outputs in an order of their own, and each group has a zero point"

    def describe(self) -> str:
        return f"{self.label}, " + (f"groups of {self.group}" if self.group else "a scale per row")


def in_order(places: Tensor) -> Tensor:
    """Codes [..., n x 8] as they stand in words -> in their own order: even ones stand in the first half."""
    return places.unflatten(-1, (-1, 2, PER_WORD // 2)).mT.flatten(-3)

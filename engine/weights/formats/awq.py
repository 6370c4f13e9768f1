"""AWQ (arXiv 2306.00978), its GEMM layout: 4-bit integers, eight a word along the outputs, in an order of its own.

`qweight` I32 [H, F / 8], `qzeros` I32 [H / group, F / 8], `scales` F16 [H / group, F]. Code i of a word stands at place
(0, 4, 1, 5, 2, 6, 3, 7)[i] of it. A number is (code - zero) x scale, in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from firstlight.engine.weights.formats.gptq import codes_of
from firstlight.engine.weights.formats.grid import COLUMNS, ROWS, Axis, Box, Format, Packing, Part

if TYPE_CHECKING:
    from torch import Tensor

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
OUTPUTS = tuple(ORDER.index(place) for place in range(8))  # which code stands in each place
BITS, PER_WORD, MIDDLE = 4, 8, 8
LOW = 0x0F0F0F0F  # of each byte of a word, the first code


class Awq(Format, frozen=True, kw_only=True):
    """`group` inputs share a scale and a zero point; `WHOLE`: all of them.

    `symmetric`: zero points are there as well, and must be the middle of the codes.
    """

    group: int = 128
    symmetric: bool = False

    label: ClassVar[str] = "AWQ INT4"
    of_linear: ClassVar[bool] = True

    @property
    def parts(self) -> tuple[Part, ...]:
        groups = Axis(COLUMNS, self.group) if self.group else 1
        words = Axis(ROWS, PER_WORD)
        return (
            Part("codes", "qweight", ("I32",), (Axis(COLUMNS), words)),
            Part("zero", "qzeros", ("I32",), (groups, words)),
            Part("scale", "scales", ("F16", "BF16", "F32"), (groups, Axis(ROWS))),
        )

    def packing(self, codes: str) -> Packing:
        return Packing("int4", (1, self.group), zero=True)

    def lies(self, role: str) -> bool:
        return False

    def laid(self, role: str, stored: Tensor, box: Box) -> Tensor:
        from firstlight.engine.weights.formats.unpacking import span, zero_points

        if role == "scale":
            return stored.mT
        if role == "codes":
            return span(turned(stored), -2, box[ROWS], PER_WORD)
        return zero_points(self._each(stored, box).mT, BITS)

    def _each(self, words: Tensor, box: Box) -> Tensor:
        """Codes or zero points of the rows of a box, [inputs or groups, rows], one a byte."""
        from firstlight.engine.weights.formats.unpacking import codes, span

        return span(in_order(codes(words, BITS)), -1, box[ROWS], PER_WORD)

    def unpack(self, stored: Mapping[str, Tensor], box: Box, shape: tuple[int, ...]) -> Tensor:
        from firstlight.engine.weights.formats.unpacking import scaled, shifted

        turned, block = (*box[:ROWS], box[COLUMNS], box[ROWS]), (self.group, 1)
        values, zero = (self._each(stored[role], box).float() for role in ("codes", "zero"))
        return scaled(shifted(values, zero, turned, block), stored["scale"].float(), turned, block).mT

    def problem(self, stored: Mapping[str, Tensor], shape: tuple[int, ...]) -> tuple[str, str, str] | None:
        wrong = codes_of(stored["zero"], BITS) - {MIDDLE} if self.symmetric and "zero" in stored else ()
        said = f"zero points of {MIDDLE}, since zero_point is false"
        return ("zero", said, f"zero points of {min(wrong)}") if wrong else None

    def describe(self) -> str:
        return f"{self.label}, " + (f"groups of {self.group}" if self.group else "a scale per row")


def turned(words: Tensor) -> Tensor:
    """Words [..., H, F / 8] -> codes by rows [..., F, ceil(H / 2)], two a byte, the first one low.

    Every byte of a word holds codes of two outputs. Those of two inputs become two bytes of a row each while they are
    in words, and words are turned round: single codes would take four times as long.
    """
    import torch

    even = torch.nn.functional.pad(words, (0, 0, 0, words.shape[-2] % 2))
    one, other = even.unflatten(-2, (-1, 2)).unbind(-2)
    first = (one & LOW) | ((other & LOW) << BITS)
    second = ((one >> BITS) & LOW) | (other & ~LOW)
    found = words.new_empty(*words.shape[:-2], words.shape[-1], PER_WORD, one.shape[-2], dtype=torch.uint8)
    for part, outputs in ((first, OUTPUTS[::2]), (second, OUTPUTS[1::2])):
        by_row = part.mT.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))
        for byte, output in enumerate(outputs):
            found[..., output, :] = by_row[..., byte]
    return found.flatten(-3, -2)


def in_order(places: Tensor) -> Tensor:
    """Codes [..., n x 8] as they stand in words -> in their own order: even ones stand in the first half."""
    return places.unflatten(-1, (-1, 2, PER_WORD // 2)).mT.flatten(-3)

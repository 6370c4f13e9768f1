"""FP8 weights with float scales: per tensor, per row, per block, and in groups (MXFP8).

Releases spell it in many ways: DeepSeek-V3 (arXiv 2412.19437, section 3.3) has a weight [F, H] in F8_E4M3 and
`weight_scale_inv` [ceil(F / 128), ceil(H / 128)] in F32, later releases of it powers of two in F8_E8M0 as `scale`;
compressed-tensors `float-quantized` has `weight_scale`, [F, 1] or one; fbgemm and ModelOpt the same. A number is
code x scale, computed in float32; only GPTQModel's `weight_scale_inv` is what its name says, and a number code / scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import msgspec

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

CODES = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
KINDS = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2"}  # of codes that operators multiply by
SUFFIXES = ("weight_scale_inv", "weight_scale", "scale")


class Fp8(Format, frozen=True, kw_only=True):
    """One scale for each block of (rows, columns); `WHOLE` of both is one a tensor.

    Where the configuration gives no block, headers tell one scale a tensor from one a row. `inverse`: codes are divided
    by what is stored.
    """

    block: tuple[int, int] = (WHOLE, WHOLE)
    code: str = "F8_E4M3"
    suffix: str = "weight_scale"
    scale: str = "F32"
    dims: tuple[Axis | int, ...] | None = None  # of the scale, as the headers spell them
    inverse: bool = False

    label: ClassVar[str] = "FP8"

    @property
    def parts(self) -> tuple[Part, ...]:
        kinds = (self.code, *(code for code in CODES if code != self.code))
        scales = (self.scale, *(kind for kind in (*SCALES, "F8_E8M0", "U8") if kind != self.scale))
        return (
            Part("codes", "weight", kinds, (Axis(ROWS), Axis(COLUMNS))),
            Part("scale", self.suffix, scales, blocked(self.block) if self.dims is None else self.dims),
        )

    def variants(self) -> tuple[Format, ...]:
        blocks = (self.block,) if self.block[1] else dict.fromkeys((self.block, (WHOLE, WHOLE), (1, WHOLE)))
        others = () if self.inverse else SUFFIXES
        suffixes = dict.fromkeys((self.suffix, *others))
        return tuple(
            msgspec.structs.replace(self, block=block, suffix=suffix, dims=dims)
            for block in blocks
            for suffix in suffixes
            for dims in spellings(block)
        )

    def packing(self, codes: str) -> Packing | None:
        return None if codes not in KINDS or self.inverse else Packing(KINDS[codes], self.block)

    def hindrance(self, codes: str) -> str:
        return "codes are divided by scales" if self.inverse else super().hindrance(codes)

    def laid(self, role: str, stored: Tensor, box: Box) -> Tensor:
        return stored if role == "codes" else as_grid(stored, self.parts[1].dims)

    def unpack(self, stored: Mapping[str, Tensor], box: Box, shape: tuple[int, ...]) -> Tensor:
        from firstlight.engine.weights.formats.unpacking import divided, fp8, scale32, scaled

        scale = as_grid(scale32(stored["scale"]), self.parts[1].dims)
        return (divided if self.inverse else scaled)(fp8(stored["codes"]), scale, box, self.block)

    def describe(self) -> str:
        return f"{self.label}, {block_words(self.block)}" + (", divided by" if self.inverse else "")


def block_words(block: tuple[int, int]) -> str:
    """`a scale per 128 x 128` and the like."""
    if block == (WHOLE, WHOLE):
        return "one scale a tensor"
    if block == (1, WHOLE):
        return "a scale per row"
    return f"groups of {block[1]}" if block[0] == 1 else f"a scale per {block[0]} x {block[1]}"

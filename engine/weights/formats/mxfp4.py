"""MXFP4: E2M1 codes, two a byte, and a power of two for each 32 inputs (OCP Microscaling Formats v1.0).

Two ways to lay it out. `MxFp4`: `weight_packed` [F, H / 2] and `weight_scale` [F, H / 32], bytes (compressed-tensors
`mxfp4-pack-quantized`: Kimi K3), or `weight` and `scale` in F8_E8M0 (DeepSeek-V4). `MxFp4Blocks`, gpt-oss: experts
stacked, `NAME_blocks` [E, F, H / 32, 16] and `NAME_scales` [E, F, H / 32], where NAME as rules speak of it is
[E, H, F].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from firstlight.engine.weights.formats.grid import COLUMNS, ROWS, Axis, Box, Format, Packing, Part

if TYPE_CHECKING:
    from torch import Tensor

GROUP = 32


class MxFp4(Format, frozen=True, kw_only=True):
    """Bytes of two codes and exponents, row by row."""

    names: tuple[str, str] = ("weight_packed", "weight_scale")
    scale: str = "U8"

    label: ClassVar[str] = "MXFP4"
    of_linear: ClassVar[bool] = True

    @property
    def parts(self) -> tuple[Part, ...]:
        scales = (self.scale, *(kind for kind in ("U8", "F8_E8M0") if kind != self.scale))
        return (
            Part("codes", self.names[0], ("U8", "I8"), (Axis(ROWS), Axis(COLUMNS, 2))),
            Part("scale", self.names[1], scales, (Axis(ROWS), Axis(COLUMNS, GROUP))),
        )

    def variants(self) -> tuple[Format, ...]:
        own = ("weight", self.names[1])
        names = dict.fromkeys((self.names, own, ("weight", "scale"), ("weight", "weight_scale_inv")))
        return tuple(MxFp4(names=name, scale=self.scale) for name in names)

    def packing(self, codes: str) -> Packing:
        return Packing("e2m1", (1, GROUP))

    def laid(self, role: str, stored: Tensor, box: Box) -> Tensor:
        from firstlight.engine.weights.formats.unpacking import row_bytes

        return row_bytes(stored, box[COLUMNS], 2, 4) if role == "codes" else stored

    def unpack(self, stored: Mapping[str, Tensor], box: Box, shape: tuple[int, ...]) -> Tensor:
        from firstlight.engine.weights.formats.unpacking import e2m1, e8m0, scaled, span

        values = span(e2m1(stored["codes"]), -1, box[COLUMNS], 2)
        return scaled(values, e8m0(stored["scale"]), box, (1, GROUP))

    def describe(self) -> str:
        return f"{self.label}, groups of {GROUP}"


class MxFp4Blocks(Format, frozen=True, kw_only=True):
    """gpt-oss: sixteen bytes a group, experts stacked, [inputs, outputs] as rules speak of it."""

    label: ClassVar[str] = "MXFP4 blocks"
    swapped: ClassVar[bool] = True

    @property
    def parts(self) -> tuple[Part, ...]:
        groups = Axis(COLUMNS, GROUP)
        return (
            Part("codes", "blocks", ("U8",), (Axis(ROWS), groups, GROUP // 2)),
            Part("scale", "scales", ("U8",), (Axis(ROWS), groups)),
        )

    def unpack(self, stored: Mapping[str, Tensor], box: Box, shape: tuple[int, ...]) -> Tensor:
        from firstlight.engine.weights.formats.unpacking import e2m1, e8m0, span

        values = e2m1(stored["codes"]).mul_(e8m0(stored["scale"]).unsqueeze(-1))
        return span(values.flatten(-2), -1, box[COLUMNS], GROUP)

    def packing(self, codes: str) -> Packing:
        return Packing("e2m1", (1, GROUP))

    def laid(self, role: str, stored: Tensor, box: Box) -> Tensor:
        from firstlight.engine.weights.formats.unpacking import row_bytes

        return row_bytes(stored.flatten(-2), box[COLUMNS], GROUP, 4) if role == "codes" else stored

    def describe(self) -> str:
        return f"{self.label}, groups of {GROUP}"

"""NVFP4: E2M1 codes, two a byte, an FP8 scale for each 16 inputs and one float32 scale for the tensor.

compressed-tensors `nvfp4-pack-quantized`: `weight_packed` [F, H / 2], `weight_scale` F8_E4M3 [F, H / 16] and
`weight_global_scale`, by which scales are divided. ModelOpt: `weight`, `weight_scale` and `weight_scale_2`, by which
they are multiplied. Source: NVIDIA, "Introducing NVFP4", 2025; the two exporters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from firstlight.engine.weights.formats.grid import COLUMNS, ROWS, Axis, Box, Format, Packing, Part

if TYPE_CHECKING:
    from torch import Tensor

GROUP = 16


class NvFp4(Format, frozen=True, kw_only=True):
    """Two levels of scales; `divide` tells the exporters apart."""

    divide: bool = True
    dims: tuple[int, ...] = (1,)  # of the outer scale

    label: ClassVar[str] = "NVFP4"
    of_linear: ClassVar[bool] = True

    @property
    def parts(self) -> tuple[Part, ...]:
        codes, outer = ("weight_packed", "weight_global_scale") if self.divide else ("weight", "weight_scale_2")
        return (
            Part("codes", codes, ("U8",), (Axis(ROWS), Axis(COLUMNS, 2))),
            Part("scale", "weight_scale", ("F8_E4M3",), (Axis(ROWS), Axis(COLUMNS, GROUP))),
            Part("outer", outer, ("F32",), self.dims),
        )

    def variants(self) -> tuple[Format, ...]:
        spelt = dict.fromkeys((self.dims, (1,), (), (1, 1)))
        return tuple(NvFp4(divide=self.divide, dims=dims) for dims in spelt)

    def unpack(self, stored: Mapping[str, Tensor], box: Box, shape: tuple[int, ...]) -> Tensor:
        from firstlight.engine.weights.formats.unpacking import e2m1, fp8, scaled, span

        outer = stored["outer"].reshape(*stored["scale"].shape[:-2], 1, 1)
        scales = fp8(stored["scale"])
        scales = scales / outer if self.divide else scales * outer
        return scaled(span(e2m1(stored["codes"]), -1, box[COLUMNS], 2), scales, box, (1, GROUP))

    def packing(self, codes: str) -> Packing:
        return Packing("e2m1", (1, GROUP), outer="by" if self.divide else "times")

    def lies(self, role: str) -> bool:
        return True

    def laid(self, role: str, stored: Tensor, box: Box) -> Tensor:
        from firstlight.engine.weights.formats.unpacking import row_bytes

        if role == "codes":
            return row_bytes(stored, box[COLUMNS], 2, 4)
        return stored.reshape(1, 1) if role == "outer" else stored

    def describe(self) -> str:
        return f"{self.label}, groups of {GROUP}"

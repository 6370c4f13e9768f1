"""compressed-tensors `pack-quantized`: integers of 2, 4 or 8 bits in 32-bit words along the inputs (Kimi K2.5).

With w codes a word: `weight_packed` I32 [F, ceil(H / w)], lowest bits first, codes shifted by 2^(bits - 1);
`weight_scale` [F, H / group] or [F, 1]; `weight_shape` [2], the true F and H; where it is not symmetric
`weight_zero_point` I32 [ceil(F / w), H / group], packed along the outputs; with activation order `weight_g_idx`
I32 [H], the group of each input. A number is (code - zero point) x scale, in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from firstlight.engine.weights.formats.grid import COLUMNS, ROWS, WHOLE, Axis, Box, Format, Packing, Part

if TYPE_CHECKING:
    from torch import Tensor


class PackedInt(Format, frozen=True, kw_only=True):
    """Integers in words; `group` `WHOLE` is one scale a row. `shape_dtype`: of `weight_shape`, empty for none.

    Zero points and an order that are announced must be there; headers may have them though nobody announced them.
    """

    bits: int
    group: int
    zero_point: bool = False
    ordered: bool = False
    shape_dtype: str = "I32"

    label: ClassVar[str] = "packed INT"
    of_linear: ClassVar[bool] = True

    @property
    def padding(self) -> int:
        return self.per_word

    @property
    def per_word(self) -> int:
        return 32 // self.bits

    @property
    def parts(self) -> tuple[Part, ...]:
        groups = Axis(COLUMNS, self.group, whole=self.ordered) if self.group else 1
        found = [
            Part("codes", "weight_packed", ("I32",), (Axis(ROWS), Axis(COLUMNS, self.per_word))),
            Part("scale", "weight_scale", ("BF16", "F16", "F32", "F64"), (Axis(ROWS), groups)),
        ]
        if self.shape_dtype:
            kinds = (self.shape_dtype, *(kind for kind in ("I32", "I64") if kind != self.shape_dtype))
            found.append(Part("shape", "weight_shape", kinds, (), of_shape=True))
        if self.zero_point:
            found.append(Part("zero", "weight_zero_point", ("I32",), (Axis(ROWS, self.per_word), groups)))
        if self.ordered:
            found.append(Part("order", "weight_g_idx", ("I32", "I64"), (Axis(COLUMNS),)))
        return tuple(found)

    def variants(self) -> tuple[Format, ...]:
        return tuple(
            PackedInt(bits=self.bits, group=self.group, zero_point=zero, ordered=order, shape_dtype=shape)
            for zero in dict.fromkeys((self.zero_point, True))
            for order in dict.fromkeys((self.ordered, True))
            for shape in dict.fromkeys((self.shape_dtype, "I32", ""))
        )

    @property
    def has_order(self) -> bool:
        """Whether an order says anything: all inputs may share one scale."""
        return self.ordered and self.group != WHOLE

    def packing(self, codes: str) -> Packing:
        return Packing(f"int{self.bits}", (1, self.group), zero=self.zero_point, ordered=self.has_order)

    def lies(self, role: str) -> bool:
        return role == "scale" or (role == "codes" and self.bits != 8)  # an order is looked at first

    def laid(self, role: str, stored: Tensor, box: Box) -> Tensor:
        from firstlight.engine.weights.formats.unpacking import row_bytes, zero_points

        if role == "codes":
            found = row_bytes(stored, box[COLUMNS], self.per_word, self.bits)
            return found if self.bits != 8 else found ^ 0x80
        if role == "zero":
            return zero_points(self._zeros(stored, box), self.bits)
        return stored.unsqueeze(-2) if role == "order" else stored

    def _zeros(self, words: Tensor, box: Box) -> Tensor:
        """Zero points as they are stored, one a byte."""
        from firstlight.engine.weights.formats.unpacking import codes_down, span

        return span(codes_down(words, self.bits), -2, box[ROWS], self.per_word)

    def unpack(self, stored: Mapping[str, Tensor], box: Box, shape: tuple[int, ...]) -> Tensor:
        from firstlight.engine.weights.formats.unpacking import codes, of_groups, scaled, shifted, span

        middle, block = 1 << (self.bits - 1), (1, self.group)
        values = span(codes(stored["codes"], self.bits), -1, box[COLUMNS], self.per_word).float().sub_(middle)
        zero = self._zeros(stored["zero"], box).float().sub_(middle) if self.zero_point else None
        scales = stored["scale"].float()
        if self.ordered:
            scales, block = of_groups(scales, stored["order"]), (1, 1)
            zero = None if zero is None else of_groups(zero, stored["order"])
        if zero is not None:
            values = shifted(values, zero, box, block)
        return scaled(values, scales, box, block)

    def problem(self, stored: Mapping[str, Tensor], shape: tuple[int, ...]) -> tuple[str, str, str] | None:
        said = stored["shape"].tolist() if "shape" in stored else list(shape)
        if said != list(shape):
            return "shape", str(list(shape)), str(said)
        return group_problem(stored, self.parts[1].shape(shape)[-1])

    def describe(self) -> str:
        group = f"groups of {self.group}" if self.group else "a scale per row"
        more = (", zero points" if self.zero_point else "") + (", activation order" if self.ordered else "")
        return f"{self.label}{self.bits}, {group}{more}"


def group_problem(stored: Mapping[str, Tensor], groups: int) -> tuple[str, str, str] | None:
    """Inputs that `g_idx` puts into a group that is not there."""
    order = stored.get("order")
    if order is None or not order.numel():
        return None
    low, high = int(order.min()), int(order.max())
    return ("order", f"groups 0 to {groups - 1}", f"groups {low} to {high}") if low < 0 or high >= groups else None

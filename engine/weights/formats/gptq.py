"""GPTQ (arXiv 2210.17323) as AutoGPTQ and GPTQModel save it: integers of 2, 4 or 8 bits in words along the inputs.

With w codes a word: `qweight` I32 [H / w, F], `qzeros` I32 [H / group, F / w], `scales` F16 [H / group, F], and `g_idx`
I32 [H], the group of each input, in any order with `desc_act`. Zero points are stored less one, in `gptq_v2` as they
are. GPTQModel takes the one from each word as a whole, so that a zero point of 0 borrows from the next; AutoGPTQ loses
the words of such zero points. A number is (code - zero) x scale, in float32; `sym` says that the zero is the middle of
the codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import msgspec

from firstlight.engine.weights.formats.grid import COLUMNS, ROWS, WHOLE, Axis, Box, Format, Packing, Part
from firstlight.engine.weights.formats.packed_int import group_problem

if TYPE_CHECKING:
    from torch import Tensor


def codes_of(words: Tensor, bits: int) -> set[int]:
    """The codes that occur in words."""
    from firstlight.engine.weights.formats.unpacking import codes

    return set(codes(words, bits).flatten().bincount().nonzero().flatten().tolist())


class Gptq(Format, frozen=True, kw_only=True):
    """`group` `WHOLE`: one scale for all inputs. `ordered`: `g_idx` says which group an input belongs to.

    `shuffled`: in any order, so that it must be there. `symmetric`: zero points must be the middle of the codes.
    `borrows`: words were made less by one in each place as whole numbers, so that none is lost.
    """

    bits: int = 4
    group: int = 128
    zero_offset: int = 1
    ordered: bool = True
    shuffled: bool = False
    symmetric: bool = False
    borrows: bool = False

    label: ClassVar[str] = "GPTQ INT"

    @property
    def parts(self) -> tuple[Part, ...]:
        per_word = 32 // self.bits
        groups = Axis(COLUMNS, self.group, whole=self.ordered) if self.group else 1
        found = (
            Part("codes", "qweight", ("I32",), (Axis(COLUMNS, per_word), Axis(ROWS))),
            Part("zero", "qzeros", ("I32",), (groups, Axis(ROWS, per_word))),
            Part("scale", "scales", ("F16", "BF16", "F32"), (groups, Axis(ROWS))),
        )
        return (*found, Part("order", "g_idx", ("I32", "I64"), (Axis(COLUMNS),))) if self.ordered else found

    def variants(self) -> tuple[Format, ...]:
        other = () if self.shuffled else (msgspec.structs.replace(self, ordered=not self.ordered),)
        return (self, *other)

    def packing(self, codes: str) -> Packing:
        return Packing(f"int{self.bits}", (1, self.group), zero=True, ordered=self.has_order)

    @property
    def has_order(self) -> bool:
        """Whether an order says anything: all inputs may share one scale."""
        return self.ordered and self.group != WHOLE

    def lies(self, role: str) -> bool:
        return False  # an order as well is looked at first

    def laid(self, role: str, stored: Tensor, box: Box) -> Tensor:
        import torch

        from firstlight.engine.weights.formats.unpacking import row_bytes, zero_points

        if role == "codes":
            words = stored.mT.clone(memory_format=torch.contiguous_format)
            found = row_bytes(words, box[COLUMNS], 32 // self.bits, self.bits)
            return found if self.bits != 8 else found ^ 0x80
        if role == "zero":
            return zero_points(self._zero_codes(stored, box).mT, self.bits)
        return stored.unsqueeze(-2) if role == "order" else stored.mT

    def unpack(self, stored: Mapping[str, Tensor], box: Box, shape: tuple[int, ...]) -> Tensor:
        from firstlight.engine.weights.formats.unpacking import of_groups, scaled, shifted

        block, turned = (self.group, 1), (*box[:ROWS], box[COLUMNS], box[ROWS])
        values = self._codes(stored["codes"], box).float()
        zero = self._zero_codes(stored["zero"], box).float()
        scales = stored["scale"].float()
        if self.has_order:
            zero, scales = of_groups(zero, stored["order"], -2), of_groups(scales, stored["order"], -2)
            block = (1, 1)
        return scaled(shifted(values, zero, turned, block), scales, turned, block).mT

    def _codes(self, words: Tensor, box: Box) -> Tensor:
        """Codes of a box, [inputs, rows], one a byte."""
        from firstlight.engine.weights.formats.unpacking import codes_down, span

        return span(codes_down(words, self.bits), -2, box[COLUMNS], 32 // self.bits)

    def _zero_codes(self, words: Tensor, box: Box) -> Tensor:
        """Zero points of the rows of a box, [groups, rows], one a byte."""
        from firstlight.engine.weights.formats.unpacking import codes, span

        return span(codes(self._zeros(words), self.bits), -1, box[ROWS], 32 // self.bits)

    def _zeros(self, words: Tensor) -> Tensor:
        """Words of zero points as they are: one more in each place, carried over as it was borrowed."""
        return words + self.zero_offset * sum(1 << place for place in range(0, 32, self.bits))

    def problem(self, stored: Mapping[str, Tensor], shape: tuple[int, ...]) -> tuple[str, str, str] | None:
        if "zero" not in stored:
            return group_problem(stored, self.parts[1].shape(shape)[-2])
        middle, most, word = 1 << (self.bits - 1), (1 << self.bits) - 1, stored["zero"]
        if self.zero_offset and not self.borrows and word.numel() and most in codes_of(word, self.bits):
            said = "its writer took one from a zero point of 0, and no tool says that it borrowed from the next"
            return "zero", f"codes of zero points below {most}, stored less one", f"{most}: {said}"
        found = codes_of(self._zeros(word), self.bits) if self.symmetric and word.numel() else ()
        if wrong := sorted(set(found) - {middle}):
            return "zero", f"zero points of {middle}, since sym is true", f"zero points of {wrong[0]}"
        return group_problem(stored, self.parts[1].shape(shape)[-2])

    def describe(self) -> str:
        group = f"groups of {self.group}" if self.group else "a scale per row"
        return f"{self.label}{self.bits}, {group}" + (", g_idx" if self.ordered else "")

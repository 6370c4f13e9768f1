"""GPTQ (arXiv 2210.17323) as AutoGPTQ, GPTQModel and AutoRound save it: integers of 2 to 8 bits in words along the
inputs, the lowest bits first. Of widths that divide no word, 32 codes lie in as many words, over their edges.

With w = 32 / bits codes a word: `qweight` I32 [H / w, F], `qzeros` I32 [H / group, F / w], `scales` F16 [H / group, F],
and `g_idx` I32 [H], the group of each input, in any order with `desc_act`. Zero points are stored less one, in
`gptq_v2` as they are. GPTQModel takes the one from each word as a whole, so that a zero point of 0 borrows from the
next, or of 3 bits from each alone, so that it becomes 7; AutoGPTQ loses the words of such zero points. A number is
(code - zero) x scale, in float32; `sym` says that the zero is the middle of the codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import msgspec

from firstlight.engine.weights.formats.grid import COLUMNS, ROWS, WHOLE, Axis, Box, Format, Packing, Part, words_of
from firstlight.engine.weights.formats.packed_int import group_problem

if TYPE_CHECKING:
    from torch import Tensor


def codes_of(words: Tensor, bits: int) -> set[int]:
    """The codes that occur in words."""
    from firstlight.engine.weights.formats.unpacking import codes

    return occurring(codes(words, bits))


def occurring(codes: Tensor) -> set[int]:
    """The numbers that occur among codes."""
    return set(codes.flatten().bincount().nonzero().flatten().tolist())


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
    of_linear: ClassVar[bool] = True

    @property
    def parts(self) -> tuple[Part, ...]:
        groups = Axis(COLUMNS, self.group, whole=self.ordered) if self.group else 1
        found = (
            Part("codes", "qweight", ("I32",), (words_of(COLUMNS, self.bits), Axis(ROWS))),
            Part("zero", "qzeros", ("I32",), (groups, words_of(ROWS, self.bits))),
            Part("scale", "scales", ("F16", "BF16", "F32"), (groups, Axis(ROWS))),
        )
        return (*found, Part("order", "g_idx", ("I32", "I64"), (Axis(COLUMNS),))) if self.ordered else found

    def variants(self) -> tuple[Format, ...]:
        other = () if self.shuffled else (msgspec.structs.replace(self, ordered=not self.ordered),)
        return (self, *other)

    def packing(self, codes: str) -> Packing:
        return Packing(f"int{self.held_bits}", (1, self.group), zero=True, ordered=self.has_order)

    @property
    def held_bits(self) -> int:
        """The width that operators multiply by which takes these codes."""
        return next(bits for bits in (2, 4, 8) if bits >= self.bits)

    @property
    def per_block(self) -> int:
        """Codes in whole words."""
        return 32 if 32 % self.bits else 32 // self.bits

    @property
    def has_order(self) -> bool:
        """Whether an order says anything: all inputs may share one scale."""
        return self.ordered and self.group != WHOLE

    def lies(self, role: str) -> bool:
        return False  # an order as well is looked at first

    def laid(self, role: str, stored: Tensor, box: Box) -> Tensor:
        import torch

        from firstlight.engine.weights.formats.unpacking import row_bytes, turned_codes, zero_points

        if role == "codes":
            if self.bits == self.held_bits:
                words = stored.mT.clone(memory_format=torch.contiguous_format)
                found = row_bytes(words, box[COLUMNS], self.per_block, self.bits)
            else:
                found = turned_codes(self._codes(stored, box), self.held_bits)
            return found if self.held_bits != 8 else found ^ 0x80
        if role == "zero":
            return zero_points(self._zero_codes(stored, box).mT, self.held_bits)
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

        return span(codes_down(words, self.bits), -2, box[COLUMNS], self.per_block)

    def _zero_codes(self, words: Tensor, box: Box) -> Tensor:
        """Zero points of the rows of a box, [groups, rows], one a byte."""
        from firstlight.engine.weights.formats.unpacking import span

        return span(self._zeros(words), -1, box[ROWS], self.per_block)

    def _zeros(self, words: Tensor) -> Tensor:
        """Zero points as they are: one more in each place, carried over as it was borrowed."""
        from firstlight.engine.weights.formats.unpacking import codes

        if 32 % self.bits:
            return (codes(words, self.bits) + self.zero_offset) & ((1 << self.bits) - 1)
        return codes(words + self.zero_offset * sum(1 << place for place in range(0, 32, self.bits)), self.bits)

    def problem(self, stored: Mapping[str, Tensor], shape: tuple[int, ...]) -> tuple[str, str, str] | None:
        if "zero" not in stored:
            return group_problem(stored, self.parts[1].shape(shape)[-2])
        middle, most, word = 1 << (self.bits - 1), (1 << self.bits) - 1, stored["zero"]
        if self.zero_offset and not self.borrows and word.numel() and most in codes_of(word, self.bits):
            said = "its writer took one from a zero point of 0, and no tool says that it borrowed from the next"
            return "zero", f"codes of zero points below {most}, stored less one", f"{most}: {said}"
        found = occurring(self._zeros(word)) if self.symmetric and word.numel() else ()
        if wrong := sorted(set(found) - {middle}):
            shifted, form = (middle + 1, "gptq_v2") if self.zero_offset else (middle - 1, "gptq")
            more = f", as checkpoint_format {form!r} stores them" if found == {shifted} else ""
            return "zero", f"zero points of {middle}, since sym is true", f"zero points of {wrong[0]}{more}"
        return group_problem(stored, self.parts[1].shape(shape)[-2])

    def describe(self) -> str:
        group = f"groups of {self.group}" if self.group else "a scale per row"
        return f"{self.label}{self.bits}, {group}" + (", g_idx" if self.ordered else "")

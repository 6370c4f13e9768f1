"""Cases of products with packed weights: every kind of codes, blocks that end early, whole rows, experts of others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from firstlight.kernels import testing
from firstlight.kernels.moe.cases import MoeCase
from firstlight.kernels.packed.kinds import CODE_BITS
from firstlight.kernels.packed.matrix import PackedMatrix
from firstlight.kernels.testing import Call, Work

WIDTHS: Mapping[str, float] = {"e2m1": 2.8, "int2": 1.2, "int4": 4.6, "int8": 74.0, "e4m3": 107.0, "e5m2": 6e3}
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True, slots=True)
class Form:
    """How the weights of a case are stored: kind of codes, rows and columns of a block (0: all), dtype of scales.

    `zero`: dtype of zero points. `outer`: scales are multiplied (`times`) or divided (`by`) by another. `ordered`:
    columns are in groups in any order. `together`: rows with an outer scale and an order in common (0: all).
    """

    code: str
    block: tuple[int, int]
    scale: torch.dtype = torch.float32
    words: bool = False  # codes in 32-bit words, the last of which may be part empty
    zero: torch.dtype | None = None
    outer: str = ""
    ordered: bool = False
    together: int = 0

    def make(self, shape: tuple[int, ...], random: torch.Generator, device: torch.device) -> PackedMatrix:
        """Any codes; scales so that products with unit inputs are of the order of one."""
        columns = shape[-1]
        row_bytes = -(-columns * CODE_BITS[self.code] // 8)
        row_bytes = -(-row_bytes // 4) * 4 if self.words else row_bytes
        codes = torch.randint(0, 256, (*shape[:-1], row_bytes), dtype=torch.uint8, generator=random)
        if self.code in FP8:  # of those, only numbers
            largest = 0x7E if self.code == "e4m3" else 0x6F
            codes = (codes & 0x80) | (codes & 0x7F).clamp(max=largest)
        grid = [-(-size // block) if block else 1 for size, block in zip(shape[-2:], self.block, strict=True)]
        size = 1.0 / (WIDTHS[self.code] * columns**0.5)
        factors = size * torch.exp2(torch.randint(-2, 2, (*shape[:-2], *grid), generator=random).float())
        if self.scale == torch.uint8:
            scales = (factors.log2().round() + 127).to(torch.uint8)
        else:
            factors *= (1 + torch.rand(factors.shape, generator=random)) * (size**-1 if self.outer else 1.0)
            scales = factors.to(self.scale)
        codes = codes.view(torch.int32) if self.words else codes
        zeros, outer, order = self._beside(shape, grid, size, random)
        return PackedMatrix(
            codes.to(device),
            scales.to(device),
            self.code,
            self.block,
            columns,
            zeros=None if zeros is None else zeros.to(device),
            outer=None if outer is None else outer.to(device),
            divides=self.outer == "by",
            order=None if order is None else order.to(device),
            rows_together=self.together,
        )

    def _beside(
        self, shape: tuple[int, ...], grid: list[int], size: float, random: torch.Generator
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Zero points, outer scales and orders, where this form has them."""
        zeros = outer = order = None
        lead, together = shape[:-2], -(-shape[-2] // self.together) if self.together else 1
        if self.zero is not None:
            zeros = torch.randint(-2, 3, (*lead, *grid), generator=random).to(self.zero)
        if self.outer:
            outer = (size ** (1 if self.outer == "times" else -1)) * (
                1 + torch.rand((*lead, together, 1), generator=random)
            )
        if self.ordered:
            order = torch.randint(0, grid[1], (*lead, together, shape[-1]), dtype=torch.int32, generator=random)
        return zeros, outer, order

    def nbytes(self, elements: int) -> int:
        rows, columns = self.block
        scales = elements // max(rows, 1) // columns if columns else 0
        each = self.scale.itemsize + (0 if self.zero is None else self.zero.itemsize)
        return elements * CODE_BITS[self.code] // 8 + scales * each


MXFP4 = Form("e2m1", (1, 32), torch.uint8)
INT4 = Form("int4", (1, 32), torch.bfloat16, words=True)
INT4_ZEROS = Form("int4", (1, 32), torch.float16, zero=torch.int8)
NVFP4 = Form("e2m1", (1, 16), torch.float8_e4m3fn, outer="by", together=16)
FP8_BLOCKS = Form("e4m3", (16, 32))


@dataclass(frozen=True, slots=True)
class LinearCase:
    """`rows` of x times a weight [width, hidden]."""

    name: str
    form: Form
    rows: int
    hidden: int
    width: int
    bias: bool = False
    benchmark: bool = False

    operator: str = "linear_packed"

    @property
    def shapes(self) -> Mapping[str, int]:
        return {"hidden": self.hidden}

    def make(self, device: torch.device, dtype: torch.dtype) -> Call:
        random = testing.generator(self, dtype)
        x_TH = torch.randn(self.rows, self.hidden, generator=random).to(device, dtype)
        weight = self.form.make((self.width, self.hidden), random, device)
        bias = torch.randn(self.width, generator=random).to(device, dtype) if self.bias else None
        return Call((x_TH, weight, bias))

    def work(self, dtype: torch.dtype) -> Work:
        elements = self.hidden * self.width
        moved = self.form.nbytes(elements) + self.rows * (self.hidden + self.width) * dtype.itemsize
        return Work(bytes=moved, flops=2 * self.rows * elements)

    def distance(self, got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
        return testing.distance(got, want)


@dataclass(frozen=True, slots=True)
class PackedMoeCase(MoeCase):
    """As a case of `moe`, over weights in `form`."""

    form: Form = INT4

    operator: str = "moe_packed"

    def weight(
        self, shape: tuple[int, ...], random: torch.Generator, device: torch.device, dtype: torch.dtype
    ) -> PackedMatrix:
        return self.form.make(shape, random, device)

    def weight_bytes(self, elements: int, dtype: torch.dtype) -> int:
        return self.form.nbytes(elements)


CASES: tuple[LinearCase | PackedMoeCase, ...] = (
    LinearCase("INT4 in groups", INT4, 5, 96, 40),
    LinearCase("INT4, a last group and word part empty", Form("int4", (1, 32), torch.float16, words=True), 3, 76, 17),
    LinearCase("INT4, a scale per row", Form("int4", (1, 0), torch.float32, words=True), 1, 64, 33, bias=True),
    LinearCase("FP8 in blocks", FP8_BLOCKS, 7, 128, 64, bias=True),
    LinearCase("FP8, blocks that end early", Form("e4m3", (128, 128), torch.bfloat16), 19, 200, 150),
    LinearCase("FP8 E5M2, a scale per row", Form("e5m2", (1, 0)), 2, 40, 24),
    LinearCase("FP8, one scale", Form("e4m3", (0, 0)), 1, 72, 40),
    LinearCase("MXFP8", Form("e4m3", (1, 32), torch.uint8), 4, 64, 48),
    LinearCase("INT8, a scale per row", Form("int8", (1, 0), torch.bfloat16), 6, 56, 64, bias=True),
    LinearCase("MXFP4", MXFP4, 3, 160, 24),
    LinearCase("no rows", INT4, 0, 64, 32),
    LinearCase("NVFP4, its scales divided", NVFP4, 3, 144, 40),
    LinearCase("NVFP4, its scales multiplied", Form("e2m1", (1, 16), torch.float8_e4m3fn, outer="times"), 2, 64, 24),
    LinearCase("INT4 with zero points", INT4_ZEROS, 5, 80, 24),
    LinearCase("INT4, inputs in any order", Form("int4", (1, 16), torch.float16, zero=torch.int8, ordered=True,
                                                  together=8), 3, 88, 24),
    LinearCase("INT2 with zero points, a last byte part empty",
               Form("int2", (1, 32), torch.bfloat16, zero=torch.int8), 2, 70, 17),
    LinearCase("INT8 with zero points in floats", Form("int8", (1, 0), zero=torch.float32), 4, 40, 24, bias=True),
    LinearCase("INT4 with zero points, odd sizes", Form("int4", (1, 100), torch.float16, zero=torch.int8), 1, 1000, 63),
    LinearCase("INT8, inputs in any order, odd sizes",
               Form("int8", (1, 63), torch.float16, zero=torch.int8, ordered=True), 1, 100, 63, bias=True),
    LinearCase("FP8 in blocks of odd sizes", Form("e4m3", (63, 100), torch.bfloat16), 2, 100, 100),
    PackedMoeCase("MXFP4, odd sizes", 2, 100, 63, 2, 1, 2, form=MXFP4),
    PackedMoeCase("MXFP4, all experts here", 7, 64, 96, 4, 2, 4, form=MXFP4),
    PackedMoeCase("MXFP4, one token", 1, 160, 64, 8, 2, 8, activation="situ(4,25)", form=MXFP4),
    PackedMoeCase("INT4, upper half of the experts", 13, 64, 32, 8, 2, 4, start=4),
    PackedMoeCase("INT4, none of the chosen here", 1, 64, 32, 64, 1, 1),
    PackedMoeCase("FP8 in blocks, many rows", 40, 96, 64, 3, 3, 3, form=FP8_BLOCKS),
    PackedMoeCase("FP8, blocks that end early, biases", 9, 80, 72, 6, 2, 3, start=3,
                  activation="clamped(7,1.702,1)", biases=True, form=Form("e4m3", (64, 48))),
    PackedMoeCase("INT8, not gated", 9, 64, 32, 4, 2, 4, activation="relu2", gated=False, form=Form("int8", (1, 0))),
    PackedMoeCase("NVFP4", 9, 64, 32, 4, 2, 4, form=NVFP4),
    PackedMoeCase("INT4 with zero points, in any order", 7, 64, 32, 6, 2, 3, start=3,
                  form=Form("int4", (1, 16), torch.float16, zero=torch.int8, ordered=True, together=32)),
    PackedMoeCase("INT4, weights on the input", 9, 64, 32, 4, 2, 2, start=2, weigh_input=True),
    LinearCase("INT4, decode 1", Form("int4", (1, 128), torch.bfloat16, words=True), 1, 7168, 7168, benchmark=True),
    LinearCase("NVFP4, decode 1", Form("e2m1", (1, 16), torch.float8_e4m3fn, outer="by"),
               1, 7168, 7168, benchmark=True),
    LinearCase("INT4 with zero points, decode 1", Form("int4", (1, 128), torch.float16, zero=torch.int8),
               1, 7168, 7168, benchmark=True),
    LinearCase("FP8, decode 1", Form("e4m3", (128, 128)), 1, 7168, 7168, benchmark=True),
    LinearCase("FP8, prefill 512", Form("e4m3", (128, 128)), 512, 7168, 7168, benchmark=True),
    PackedMoeCase("MXFP4, decode 16", 16, 3584, 3072, 896, 16, 112, activation="situ(4,25)",
                  benchmark=True, form=MXFP4),
    PackedMoeCase("MXFP4, prefill 512", 512, 3584, 3072, 896, 16, 112, activation="situ(4,25)",
                  benchmark=True, form=MXFP4),
    PackedMoeCase("INT4, decode 16", 16, 7168, 2048, 384, 8, 48,
                  benchmark=True, form=Form("int4", (1, 32), torch.bfloat16, words=True)),
)  # fmt: skip

"""Cases of grouped products and of the expert layer: empty groups, one row, rows of nobody, experts of other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from firstlight.kernels import testing
from firstlight.kernels.moe.rules import ExpertRules
from firstlight.kernels.packed.matrix import PackedMatrix
from firstlight.kernels.testing import Call, Work


@dataclass(frozen=True, slots=True)
class GroupedCase:
    """`sizes` are the rows of each expert; `spare` rows at the end belong to none."""

    name: str
    sizes: tuple[int, ...]
    hidden: int
    width: int
    spare: int = 0
    benchmark: bool = False

    operator: str = "grouped_matmul"

    @property
    def shapes(self) -> Mapping[str, int]:
        return {"num_experts": len(self.sizes), "hidden": self.hidden, "intermediate": self.width}

    def make(self, device: torch.device, dtype: torch.dtype) -> Call:
        random = testing.generator(self, dtype)
        num_rows = sum(self.sizes) + self.spare
        x_MH = torch.randn(num_rows, self.hidden, generator=random).to(device, dtype)
        weight_EFH = torch.randn(len(self.sizes), self.width, self.hidden, generator=random) * self.hidden**-0.5
        starts = torch.tensor([0, *self.sizes]).cumsum(0).to(device, torch.int32)
        return Call((x_MH, weight_EFH.to(device, dtype), starts))

    def work(self, dtype: torch.dtype) -> Work:
        rows = sum(self.sizes)
        used = sum(1 for size in self.sizes if size)
        moved = used * self.hidden * self.width + rows * (self.hidden + self.width)
        return Work(bytes=moved * dtype.itemsize, flops=2 * rows * self.hidden * self.width)

    def distance(self, got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
        return testing.distance(got, want)


@dataclass(frozen=True, slots=True)
class MoeCase:
    """Each token chooses `top_k` of `experts` at random; this rank holds `local` of them from `start` on."""

    name: str
    tokens: int
    hidden: int
    width: int
    experts: int
    top_k: int
    local: int
    start: int = 0
    activation: str = "silu"
    biases: bool = False
    gated: bool = True
    weigh_input: bool = False
    benchmark: bool = False

    operator: str = "moe"

    @property
    def shapes(self) -> Mapping[str, int]:
        return {"num_experts": self.local, "hidden": self.hidden, "intermediate": self.width, "top_k": self.top_k}

    def make(self, device: torch.device, dtype: torch.dtype) -> Call:
        random = testing.generator(self, dtype)
        x_TH = torch.randn(self.tokens, self.hidden, generator=random).to(device, dtype)
        weights_TE, order_TE = torch.rand(self.tokens, self.experts, generator=random).sort(dim=-1, descending=True)
        weights_Tk, ids_Tk = weights_TE[:, : self.top_k].to(device), order_TE[:, : self.top_k].to(device)
        rows = (2 if self.gated else 1) * self.width
        shapes = ((self.local, rows, self.hidden), (self.local, self.hidden, self.width))
        weights = [self.weight(shape, random, device, dtype) for shape in shapes]
        gate_up_bias, down_bias = (
            torch.randn(*shape[:2], generator=random).to(device, dtype) if self.biases else None for shape in shapes
        )
        rules = ExpertRules(self.activation, self.start, gate_up_bias, down_bias, self.gated, self.weigh_input)
        return Call((x_TH, ids_Tk, weights_Tk, *weights, rules))

    def weight(
        self, shape: tuple[int, ...], random: torch.Generator, device: torch.device, dtype: torch.dtype
    ) -> Tensor | PackedMatrix:
        """Of a size that keeps products with unit inputs of the order of one."""
        return (torch.randn(*shape, generator=random) * shape[-1] ** -0.5).to(device, dtype)

    def weight_bytes(self, elements: int, dtype: torch.dtype) -> int:
        return elements * dtype.itemsize

    def work(self, dtype: torch.dtype) -> Work:
        pairs = self.tokens * self.top_k * self.local // self.experts
        used = min(self.local, pairs)
        weights = 3 * self.hidden * self.width
        moved = self.weight_bytes(used * weights, dtype) + 2 * self.tokens * self.hidden * dtype.itemsize
        return Work(bytes=moved, flops=2 * pairs * weights)

    def distance(self, got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
        return testing.distance(got, want)


CASES: tuple[GroupedCase | MoeCase, ...] = (
    GroupedCase("even", (16, 16), 64, 64),
    GroupedCase("odd sizes", (1, 0, 33, 7), 100, 63),
    GroupedCase("rows of nobody", (0, 5, 0), 72, 40, spare=9),
    GroupedCase("no rows at all", (0, 0, 0), 64, 64, spare=3),
    GroupedCase("many rows", (150, 0, 90), 80, 72),
    GroupedCase("one row", (0, 0, 1, 0, 0), 1000, 100),
    MoeCase("all experts here", 7, 64, 48, 4, 2, 4),
    MoeCase("odd sizes", 33, 100, 63, 5, 3, 5, activation="gelu_tanh"),
    MoeCase("one token", 1, 72, 40, 8, 2, 8),
    MoeCase("upper half of the experts", 13, 64, 32, 8, 2, 4, start=4),
    MoeCase("none of the chosen here", 1, 64, 32, 64, 1, 1, start=0),
    MoeCase("every expert chosen", 5, 40, 24, 3, 3, 3, activation="relu2"),
    MoeCase("biases and limits", 9, 64, 48, 6, 2, 3, start=3, activation="clamped(7,1.702,1)", biases=True),
    MoeCase("not gated", 9, 64, 40, 4, 2, 4, activation="relu2", gated=False),
    MoeCase("not gated, biases", 1, 72, 40, 4, 2, 4, activation="gelu", biases=True, gated=False),
    MoeCase("weights on the input", 9, 64, 40, 4, 2, 2, start=2, weigh_input=True),
    GroupedCase("64 experts x 64 rows", (64,) * 64, 2048, 1536, benchmark=True),
    MoeCase("decode 16, 128 experts", 16, 2048, 768, 128, 8, 128, benchmark=True),
    MoeCase("decode 64, 32 of 256 experts", 64, 7168, 2048, 256, 8, 32, benchmark=True),
    MoeCase("prefill 4096, 32 of 256 experts", 4096, 7168, 2048, 256, 8, 32, benchmark=True),
)

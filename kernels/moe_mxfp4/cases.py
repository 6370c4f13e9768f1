"""Cases of the expert layer over MXFP4 weights: those of `moe`, with widths of whole groups; any codes and scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from firstlight.kernels import testing
from firstlight.kernels.testing import Call, Work


@dataclass(frozen=True, slots=True)
class PackedCase:
    """As `MoeCase`; `spread`: how many powers of two the scales of groups lie apart."""

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
    spread: int = 4
    benchmark: bool = False

    operator: str = "moe_mxfp4"

    @property
    def shapes(self) -> Mapping[str, int]:
        return {"num_experts": self.local, "hidden": self.hidden, "intermediate": self.width, "top_k": self.top_k}

    def make(self, device: torch.device, dtype: torch.dtype) -> Call:
        random = testing.generator(self, dtype)
        x_TH = torch.randn(self.tokens, self.hidden, generator=random).to(device, dtype)
        weights_TE, order_TE = torch.rand(self.tokens, self.experts, generator=random).sort(dim=-1, descending=True)
        weights_Tk, ids_Tk = weights_TE[:, : self.top_k].to(device), order_TE[:, : self.top_k].to(device)
        rows = (2 if self.gated else 1) * self.width
        packed = [
            part.to(device)
            for shape in ((self.local, rows, self.hidden), (self.local, self.hidden, self.width))
            for part in self._packed(shape, random)
        ]
        shapes = ((self.local, rows), (self.local, self.hidden)) if self.biases else ()
        biases = [torch.randn(*shape, generator=random).to(device, dtype) for shape in shapes]
        args = (x_TH, ids_Tk, weights_Tk, *packed, self.activation, self.start, *(biases or (None, None)))
        return Call(args, {"gated": self.gated, "weigh_input": self.weigh_input})

    def _packed(self, shape: tuple[int, ...], random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Any codes; scales around 1 / sqrt(columns), so that outputs are of the order of one."""
        codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, generator=random)
        middle = 127 - 1 - round(torch.tensor(float(shape[-1])).log2().item() / 2)
        low, high = middle - self.spread, middle + 1
        scales = torch.randint(low, high, (*shape[:-1], shape[-1] // 32), dtype=torch.uint8, generator=random)
        return codes, scales

    def work(self, dtype: torch.dtype) -> Work:
        pairs = self.tokens * self.top_k * self.local // self.experts
        used = min(self.local, pairs)
        weights = 3 * self.hidden * self.width
        packed_bytes = used * weights * 17 // 32
        return Work(
            bytes=packed_bytes + 2 * self.tokens * self.hidden * dtype.itemsize,
            flops=2 * pairs * weights,
        )

    def distance(self, got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
        return testing.distance(got, want)


CASES: tuple[PackedCase, ...] = (
    PackedCase("all experts here", 7, 64, 96, 4, 2, 4),
    PackedCase("one group", 5, 32, 32, 4, 2, 4),
    PackedCase("one token", 1, 160, 64, 8, 2, 8, activation="situ(4,25)"),
    PackedCase("upper half of the experts", 13, 64, 32, 8, 2, 4, start=4),
    PackedCase("none of the chosen here", 1, 64, 32, 64, 1, 1),
    PackedCase("many rows", 40, 96, 64, 3, 3, 3),
    PackedCase("biases", 9, 64, 32, 6, 2, 3, start=3, activation="clamped(7,1.702,1)", biases=True),
    PackedCase("not gated", 9, 64, 32, 4, 2, 4, activation="relu2", gated=False),
    PackedCase("weights on the input", 9, 64, 32, 4, 2, 2, start=2, weigh_input=True),
    PackedCase("scales far apart", 6, 128, 64, 4, 2, 4, spread=8),
    PackedCase("decode 16", 16, 3584, 3072, 896, 16, 112, activation="situ(4,25)", benchmark=True),
    PackedCase("prefill 512", 512, 3584, 3072, 896, 16, 112, activation="situ(4,25)", benchmark=True),
)

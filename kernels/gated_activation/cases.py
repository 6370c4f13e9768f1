"""Cases of the gated activation: every function, odd widths, strided rows; and sizes to measure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from firstlight.kernels import testing
from firstlight.kernels.testing import Call, Work


@dataclass(frozen=True, slots=True)
class ActivationCase:
    """Rows of [gate | up]; `strided` takes them out of a wider tensor."""

    rows: int
    width: int
    activation: str
    strided: bool = False
    magnitude: float = 1.0
    benchmark: bool = False

    operator: str = "gated_activation"

    @property
    def name(self) -> str:
        strided = " strided" if self.strided else ""
        magnitude = f" x {self.magnitude:g}" if self.magnitude != 1 else ""
        return f"{self.rows}x{self.width} {self.activation}{strided}{magnitude}"

    @property
    def shapes(self) -> Mapping[str, int]:
        return {"intermediate": self.width}

    def make(self, device: torch.device, dtype: torch.dtype) -> Call:
        random = testing.generator(self, dtype)
        width = 2 * self.width
        wide = torch.randn(self.rows, width + (40 if self.strided else 0), generator=random) * self.magnitude
        return Call((wide.to(device, dtype)[:, :width], self.activation))

    def work(self, dtype: torch.dtype) -> Work:
        elements = self.rows * self.width
        return Work(bytes=3 * elements * dtype.itemsize, flops=8 * elements)

    def distance(self, got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
        return testing.distance(got, want)


CASES: tuple[ActivationCase, ...] = (
    ActivationCase(1, 1536, "silu"),
    ActivationCase(63, 100, "silu", strided=True),
    ActivationCase(3, 1000, "gelu"),
    ActivationCase(3, 63, "gelu_tanh", strided=True),
    ActivationCase(3, 1000, "quick_gelu"),
    ActivationCase(3, 100, "relu"),
    ActivationCase(3, 100, "relu2"),
    ActivationCase(3, 100, "sigmoid"),
    ActivationCase(2, 1000, "silu", magnitude=30.0),
    ActivationCase(2, 1000, "gelu_tanh", magnitude=30.0),
    ActivationCase(3, 100, "clamped(7,1.702,1)", magnitude=4.0),
    ActivationCase(3, 63, "clamped(10,1,0)", strided=True, magnitude=8.0),
    ActivationCase(3, 100, "capped(7)", magnitude=8.0),
    ActivationCase(5, 100, "situ(4,25)", magnitude=8.0),
    ActivationCase(2, 1000, "situ(1.5,7)", strided=True, magnitude=30.0),
    ActivationCase(16, 1536, "silu", benchmark=True),
    ActivationCase(64, 14336, "silu", benchmark=True),
    ActivationCase(4096, 14336, "silu", benchmark=True),
    ActivationCase(4096, 14336, "gelu_tanh", benchmark=True),
)

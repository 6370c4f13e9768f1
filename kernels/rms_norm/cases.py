"""Cases of RMS normalisation: odd sizes, heads, strided rows, both orders of rounding; and sizes to measure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from firstlight.kernels import testing
from firstlight.kernels.testing import Call, Work


@dataclass(frozen=True, slots=True)
class NormCase:
    """Rows of a width; `heads` puts a dim between them, `strided` takes the rows out of a wider tensor."""

    operator: str
    rows: int
    width: int
    heads: int = 0
    offset: float = 0.0
    strided: bool = False
    magnitude: float = 1.0
    benchmark: bool = False

    @property
    def name(self) -> str:
        heads = f"x{self.heads}" if self.heads else ""
        marks = "".join((" gemma" if self.offset else "", " strided" if self.strided else ""))
        return f"{self.rows}{heads}x{self.width}{marks}" + (f" x {self.magnitude:g}" if self.magnitude != 1 else "")

    @property
    def shapes(self) -> Mapping[str, int]:
        return {"hidden": self.width}

    def make(self, device: torch.device, dtype: torch.dtype) -> Call:
        random = testing.generator(self, dtype)
        lead = (self.rows, self.heads) if self.heads else (self.rows,)

        def rows() -> Tensor:
            wide = torch.randn(*lead, self.width + (24 if self.strided else 0), generator=random) * self.magnitude
            return wide.to(device, dtype)[..., : self.width]

        weight_H = (torch.randn(self.width, generator=random) + 1 - self.offset).to(device, dtype)
        inputs = (rows(),) if self.operator == "rms_norm" else (rows(), rows())
        return Call((*inputs, weight_H, 1e-5, self.offset))

    def work(self, dtype: torch.dtype) -> Work:
        elements = self.rows * max(1, self.heads) * self.width
        passes = 2 if self.operator == "rms_norm" else 4
        return Work(bytes=passes * elements * dtype.itemsize, flops=4 * elements)

    def distance(self, got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
        return testing.distance(got, want)


CASES: tuple[NormCase, ...] = (
    NormCase("rms_norm", 1, 576),
    NormCase("rms_norm", 63, 100),
    NormCase("rms_norm", 3, 1000, offset=1.0),
    NormCase("rms_norm", 5, 64, heads=3),
    NormCase("rms_norm", 7, 128, heads=2, strided=True),
    NormCase("rms_norm", 4, 63, strided=True, offset=1.0),
    NormCase("rms_norm", 2, 1000, magnitude=1e-3),
    NormCase("rms_norm", 2, 7168, magnitude=30.0),
    NormCase("add_rms_norm", 1, 576),
    NormCase("add_rms_norm", 63, 100),
    NormCase("add_rms_norm", 3, 1000, offset=1.0),
    NormCase("add_rms_norm", 4, 63, strided=True),
    NormCase("rms_norm", 2, 576, benchmark=True),
    NormCase("rms_norm", 16, 576, benchmark=True),
    NormCase("add_rms_norm", 16, 576, benchmark=True),
    NormCase("rms_norm", 1, 4096, benchmark=True),
    NormCase("rms_norm", 4096, 4096, benchmark=True),
    NormCase("rms_norm", 4096, 128, heads=32, benchmark=True),
    NormCase("add_rms_norm", 64, 7168, benchmark=True),
    NormCase("add_rms_norm", 4096, 7168, benchmark=True),
)

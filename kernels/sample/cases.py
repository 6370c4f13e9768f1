"""Cases of sampling: every combination of limits, rows of different kinds side by side, flat and peaked logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from firstlight.kernels import testing
from firstlight.kernels.testing import Call, Work

SETTINGS = (
    (0.0, 1.0, 0),
    (1.0, 1.0, 0),
    (0.7, 0.9, 0),
    (1.3, 1.0, 5),
    (1.0, 0.5, 40),
    (2.0, 0.95, 1000),
    (1.0, 0.0, 1),
)
"""Temperature, top-p, top-k: row b takes setting b modulo their number."""


@dataclass(frozen=True, slots=True)
class SampleCase:
    """`spread` is the standard deviation of the logits."""

    rows: int
    vocabulary: int
    spread: float = 3.0
    greedy: bool = False
    benchmark: bool = False

    operator: str = "sample"

    @property
    def name(self) -> str:
        return f"{self.rows}x{self.vocabulary}, spread {self.spread:g}" + (", greedy" if self.greedy else "")

    @property
    def shapes(self) -> Mapping[str, int]:
        return {"vocabulary": self.vocabulary}

    def make(self, device: torch.device, dtype: torch.dtype) -> Call:
        random = testing.generator(self, torch.float32)
        logits_BV = torch.randn(self.rows, self.vocabulary, generator=random) * self.spread
        settings = [(0.0, 1.0, 0) if self.greedy else SETTINGS[b % len(SETTINGS)] for b in range(self.rows)]
        temperature, top_p, top_k = zip(*settings, strict=True)
        return Call(
            (
                logits_BV.to(device),
                torch.tensor(temperature, device=device),
                torch.tensor(top_p, device=device),
                torch.tensor(top_k, device=device),
                torch.rand(self.rows, generator=random).to(device),
            )
        )

    def work(self, dtype: torch.dtype) -> Work:
        return Work(bytes=4 * self.rows * self.vocabulary, flops=0)

    def distance(self, got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
        return testing.distance(got, want)


CASES: tuple[SampleCase, ...] = (
    SampleCase(7, 63),
    SampleCase(21, 1000),
    SampleCase(14, 5000, spread=0.1),
    SampleCase(14, 5000, spread=10.0),
    SampleCase(3, 49152, greedy=True),
    SampleCase(1, 49152, greedy=True, benchmark=True),
    SampleCase(16, 49152, benchmark=True),
    SampleCase(64, 163840, benchmark=True),
)

"""Cases of the selective scan: prompts over blocks, steps and both at once, fresh states and old ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from firstlight.kernels import testing
from firstlight.kernels.sequences import Sequences
from firstlight.kernels.testing import Call, Work


@dataclass(frozen=True, slots=True)
class SelectiveScanCase:
    """`lengths` of the sequences, those of `fresh` at their beginning; slots are taken from the last downwards."""

    name: str
    lengths: tuple[int, ...]
    channels: int
    state_dim: int = 16
    fresh: tuple[int, ...] = ()
    benchmark: bool = False

    operator: str = "selective_scan"

    @property
    def shapes(self) -> Mapping[str, int]:
        return {"hidden": self.channels}

    def make(self, device: torch.device, dtype: torch.dtype) -> Call:
        random = testing.generator(self, dtype)
        tokens, count = sum(self.lengths), len(self.lengths)
        x_TD = torch.randn(tokens, self.channels, generator=random).to(device, dtype)
        dt_TD = torch.rand(tokens, self.channels, generator=random).to(device)
        rate_DN = (4 * torch.rand(self.channels, self.state_dim, generator=random)).to(device)
        bc = torch.randn(tokens, 2 * self.state_dim + 1, generator=random).to(device, dtype)
        b_TN, c_TN, _ = bc.split((self.state_dim, self.state_dim, 1), dim=-1)
        state = torch.randn(count + 2, self.channels, self.state_dim, generator=random).to(device)
        slots = [count + 1 - b for b in range(count)]
        sequences = Sequences.build(self.lengths, slots, [b in self.fresh for b in range(count)], device)
        return Call((x_TD, dt_TD, rate_DN, b_TN, c_TN, state, sequences), outputs=(state,))

    def work(self, dtype: torch.dtype) -> Work:
        tokens, size = sum(self.lengths), self.channels * self.state_dim
        moved = 4 * size * (1 + 2 * len(self.lengths)) + tokens * self.channels * (8 + dtype.itemsize)
        return Work(bytes=moved, flops=6 * tokens * size)

    def distance(self, got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
        return testing.distance(got, want)


CASES: tuple[SelectiveScanCase, ...] = (
    SelectiveScanCase("one prompt over blocks", (70,), 24, fresh=(0,)),
    SelectiveScanCase("steps", (1, 1, 1), 40, 8, fresh=(1,)),
    SelectiveScanCase("steps and chunks", (1, 33, 1, 2), 17, 5, fresh=(0, 3)),
    SelectiveScanCase("a prompt of one token", (1,), 20, fresh=(0,)),
    SelectiveScanCase("odd sizes", (3, 1), 100, 63, fresh=(0,)),
    SelectiveScanCase("decode 64", (1,) * 64, 8192, benchmark=True),
    SelectiveScanCase("prefill 2048", (2048,), 8192, fresh=(0,), benchmark=True),
)

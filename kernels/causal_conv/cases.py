"""Cases of the short causal convolution: prompts, steps and both at once, fresh states and old ones, odd sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from firstlight.kernels import testing
from firstlight.kernels.sequences import Sequences
from firstlight.kernels.testing import Call, Work


@dataclass(frozen=True, slots=True)
class CausalConvCase:
    """`lengths` of the sequences, those of `fresh` at their beginning; slots are taken from the last downwards."""

    name: str
    lengths: tuple[int, ...]
    channels: int
    taps: int = 4
    fresh: tuple[int, ...] = ()
    bias: bool = False
    activation: str = "silu"
    benchmark: bool = False

    operator: str = "causal_conv"

    @property
    def shapes(self) -> Mapping[str, int]:
        return {"hidden": self.channels}

    def make(self, device: torch.device, dtype: torch.dtype) -> Call:
        random = testing.generator(self, dtype)
        tokens, count = sum(self.lengths), len(self.lengths)
        x_TC = torch.randn(tokens, self.channels + 3, generator=random).to(device, dtype)[:, : self.channels]
        weight_CW = torch.randn(self.channels, self.taps, generator=random).to(device, dtype)
        bias_C = torch.randn(self.channels, generator=random).to(device, dtype) if self.bias else None
        state = torch.randn(count + 2, self.channels, self.taps - 1, generator=random).to(device, dtype)
        slots = [count + 1 - b for b in range(count)]
        sequences = Sequences.build(self.lengths, slots, [b in self.fresh for b in range(count)], device)
        return Call((x_TC, weight_CW, bias_C, state, sequences, self.activation), outputs=(state,))

    def work(self, dtype: torch.dtype) -> Work:
        tokens = sum(self.lengths)
        moved = self.channels * (2 * tokens + self.taps + 2 * (self.taps - 1) * len(self.lengths))
        return Work(bytes=moved * dtype.itemsize, flops=2 * tokens * self.channels * self.taps)

    def distance(self, got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
        return testing.distance(got, want)


CASES: tuple[CausalConvCase, ...] = (
    CausalConvCase("one prompt", (9,), 40, fresh=(0,)),
    CausalConvCase("a prompt of one token", (1,), 33, fresh=(0,), bias=True),
    CausalConvCase("steps", (1, 1, 1), 64, fresh=(1,)),
    CausalConvCase("steps and chunks", (1, 7, 1, 2), 48, fresh=(0, 3), bias=True),
    CausalConvCase("shorter than the filter", (2, 3), 20, fresh=(0,)),
    CausalConvCase("three taps, no activation", (5, 1), 36, taps=3, activation="none"),
    CausalConvCase("two taps", (4, 1, 1), 17, taps=2, fresh=(2,), bias=True),
    CausalConvCase("odd sizes", (63, 1), 100, fresh=(0,)),
    CausalConvCase("decode 64", (1,) * 64, 8192, benchmark=True),
    CausalConvCase("prefill 4096", (4096,), 8192, fresh=(0,), benchmark=True),
)

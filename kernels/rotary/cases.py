"""Cases of rotary embedding: halved and interleaved, partial, odd counts, separate and neighbouring q and k."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from firstlight.kernels import testing
from firstlight.kernels.testing import Call, Work


@dataclass(frozen=True, slots=True)
class RotaryCase:
    """`joined` cuts q and k (and a v nobody rotates) out of one tensor, as a fused projection does."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    rotated: int
    interleaved: bool = False
    joined: bool = False
    float_angles: bool = True
    benchmark: bool = False

    operator: str = "rotary"

    @property
    def name(self) -> str:
        pairs = "interleaved" if self.interleaved else "halved"
        marks = "".join((" joined" if self.joined else "", "" if self.float_angles else " rounded angles"))
        return f"{self.tokens}x{self.heads}+{self.kv_heads}x{self.head_dim} of which {self.rotated} {pairs}{marks}"

    @property
    def shapes(self) -> Mapping[str, int]:
        return {"num_heads": self.heads, "num_kv_heads": self.kv_heads, "head_dim": self.head_dim}

    def make(self, device: torch.device, dtype: torch.dtype) -> Call:
        random = testing.generator(self, dtype)
        total = self.heads + 2 * self.kv_heads
        qkv = torch.randn(self.tokens, total, self.head_dim, generator=random).to(device, dtype)
        q_TND, k_TKD, _ = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if not self.joined:
            q_TND, k_TKD = q_TND.contiguous(), k_TKD.contiguous()
        positions = torch.randint(0, 4000, (self.tokens, 1), generator=random)
        half = self.rotated // 2
        angles = positions * 10000.0 ** -(torch.arange(half) / half)
        angle_dtype = torch.float32 if self.float_angles else dtype
        cos_TR, sin_TR = angles.cos().to(device, angle_dtype), angles.sin().to(device, angle_dtype)
        return Call((q_TND, k_TKD, cos_TR, sin_TR, self.interleaved))

    def work(self, dtype: torch.dtype) -> Work:
        elements = self.tokens * (self.heads + self.kv_heads) * self.head_dim
        return Work(bytes=2 * elements * dtype.itemsize + 4 * self.tokens * self.rotated, flops=3 * elements)

    def distance(self, got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
        return testing.distance(got, want)


CASES: tuple[RotaryCase, ...] = (
    RotaryCase(1, 9, 3, 64, 64, joined=True),
    RotaryCase(63, 4, 2, 64, 64),
    RotaryCase(5, 3, 1, 80, 80, joined=True),
    RotaryCase(7, 2, 2, 100, 100, float_angles=False),
    RotaryCase(7, 4, 4, 96, 32),
    RotaryCase(5, 6, 2, 80, 20, joined=True),
    RotaryCase(5, 4, 1, 64, 64, interleaved=True),
    RotaryCase(3, 4, 2, 100, 36, interleaved=True, joined=True),
    RotaryCase(4, 16, 1, 64, 64, interleaved=True, float_angles=False),
    RotaryCase(16, 9, 3, 64, 64, joined=True, benchmark=True),
    RotaryCase(64, 32, 8, 128, 128, joined=True, benchmark=True),
    RotaryCase(4096, 32, 8, 128, 128, joined=True, benchmark=True),
    RotaryCase(4096, 128, 1, 64, 64, interleaved=True, benchmark=True),
)

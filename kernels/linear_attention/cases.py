"""Cases of linear attention with decay: with and without the delta rule, decays a head and a channel, all lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from firstlight.kernels import testing
from firstlight.kernels.sequences import Sequences
from firstlight.kernels.testing import Call, Work


@dataclass(frozen=True, slots=True)
class LinearAttentionCase:
    """`lengths` of the sequences, those of `fresh` at their beginning; slots are taken from the last downwards.

    `channel`: a decay for each key channel. `forgets` scales the decays; at 50 little is left after one step.
    """

    name: str
    lengths: tuple[int, ...]
    heads: int
    key_dim: int
    value_dim: int
    key_heads: int = 0
    delta: bool = True
    channel: bool = False
    forgets: float = 0.3
    fresh: tuple[int, ...] = (0,)
    benchmark: bool = False

    operator: str = "linear_attention"

    @property
    def shapes(self) -> Mapping[str, int]:
        return {"num_heads": self.heads, "head_dim": self.key_dim, "value_dim": self.value_dim}

    def make(self, device: torch.device, dtype: torch.dtype) -> Call:
        random = testing.generator(self, dtype)
        tokens, count, heads = sum(self.lengths), len(self.lengths), self.key_heads or self.heads
        q, k = (torch.randn(tokens, heads, self.key_dim, generator=random) for _ in range(2))
        q, k = (torch.nn.functional.normalize(one, dim=-1) for one in (q, k))
        v_TNV = torch.randn(tokens, self.heads, self.value_dim, generator=random).to(device, dtype)
        shape = (tokens, self.heads, self.key_dim) if self.channel else (tokens, self.heads)
        log_decay = -self.forgets * torch.rand(shape, generator=random).square()
        beta_TN = torch.rand(tokens, self.heads, generator=random).to(device) if self.delta else None
        state = torch.randn(count + 2, self.heads, self.key_dim, self.value_dim, generator=random).to(device)
        slots = [count + 1 - b for b in range(count)]
        sequences = Sequences.build(self.lengths, slots, [b in self.fresh for b in range(count)], device)
        args = (q.to(device), k.to(device), v_TNV, log_decay.to(device), beta_TN, state, sequences)
        return Call(args, outputs=(state,))

    def work(self, dtype: torch.dtype) -> Work:
        tokens, size = sum(self.lengths), self.heads * self.key_dim * self.value_dim
        entries = self.heads * (3 * self.key_dim + self.value_dim) + self.heads * self.value_dim
        moved = 2 * 4 * size * len(self.lengths) + tokens * entries * dtype.itemsize
        return Work(bytes=moved, flops=tokens * size * (7 if self.delta else 5))

    def distance(self, got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
        return testing.distance(got, want)


CASES: tuple[LinearAttentionCase, ...] = (
    LinearAttentionCase("delta, one prompt over chunks", (150,), 2, 16, 12),
    LinearAttentionCase("delta, exactly one chunk", (64,), 1, 8, 8),
    LinearAttentionCase("delta, groups of heads", (70, 3), 6, 20, 9, key_heads=2, fresh=(1,)),
    LinearAttentionCase("delta, steps", (1, 1, 1), 4, 16, 16, key_heads=2, fresh=(1,)),
    LinearAttentionCase("delta, steps and chunks", (1, 65, 1, 2), 3, 24, 10, fresh=(0, 3)),
    LinearAttentionCase("delta, short memory", (80,), 2, 16, 16, forgets=50.0, fresh=()),
    LinearAttentionCase("delta by channel", (50, 1), 2, 16, 12, channel=True),
    LinearAttentionCase("delta by channel, short memory", (40, 5), 2, 12, 16, channel=True, forgets=50.0, fresh=()),
    LinearAttentionCase("delta by channel, steps", (1, 1), 3, 20, 8, channel=True, fresh=()),
    LinearAttentionCase("plain", (90, 2, 1), 4, 16, 20, key_heads=1, delta=False, fresh=(1,)),
    LinearAttentionCase("plain, steps", (1, 1, 1), 4, 8, 16, key_heads=2, delta=False),
    LinearAttentionCase("plain by channel", (33, 4), 3, 8, 8, delta=False, channel=True),
    LinearAttentionCase("one value a head", (21, 1), 40, 8, 1, key_heads=1, delta=False, channel=True),
    LinearAttentionCase("delta, odd sizes", (3, 1), 2, 63, 100),
    LinearAttentionCase("plain, odd sizes", (2, 1), 1, 100, 63, delta=False, channel=True),
    LinearAttentionCase("decode 64", (1,) * 64, 32, 128, 128, key_heads=16, fresh=(), benchmark=True),
    LinearAttentionCase("decode 64 by channel", (1,) * 64, 32, 128, 128, channel=True, fresh=(), benchmark=True),
    LinearAttentionCase("prefill 4096", (4096,), 32, 128, 128, key_heads=16, benchmark=True),
    LinearAttentionCase("prefill 4096 by channel", (4096,), 32, 128, 128, channel=True, benchmark=True),
)
